"""Ends with 0 where the service in this container says that it is ready; its answer goes to the health log."""

from __future__ import annotations

import http.client
import os
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def main() -> int:
    url = urlsplit(os.environ.get("GREENROOM_HEALTH_URL", "http://127.0.0.1:8080/health"))
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path or "/")
        reply = connection.getresponse()
        sys.stdout.write(f"{reply.status} {reply.read(1024).decode(errors='replace')}\n")
        return 0 if reply.status == 200 else 1
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"no answer from {url.geturl()}: {error}\n")
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
