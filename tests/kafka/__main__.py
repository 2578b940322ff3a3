"""``make kafka``: the broker of the tests for a developer, in the foreground, on 127.0.0.1:9092."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests import reaper
from tests.kafka.broker import PASSWORD, USER, make_broker


def main() -> int:
    parser = argparse.ArgumentParser(prog="make kafka", description=__doc__)
    parser.add_argument("--port", type=int, default=9092, help="port to listen on (9092)")
    arguments = parser.parse_args()
    reaper.start()
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with tempfile.TemporaryDirectory(prefix="greenroom-kafka-") as folder:
        reaper.remove_afterwards(Path(folder))
        try:
            broker = make_broker(Path(folder), arguments.port)
            broker.start()
        except AssertionError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 1
        print(  # noqa: T201
            f"Kafka answers on {broker.address}. In the shells of the services:\n\n"
            f"  export GREENROOM_BROKERS={broker.address}\n\n"
            f"or, with TLS and a password, in place of that:\n\n"
            f"  export GREENROOM_BROKERS={broker.secure_address} GREENROOM_KAFKA_CA={broker.certificate}\n"
            f"  export GREENROOM_KAFKA_SASL=SCRAM-SHA-256 GREENROOM_KAFKA_USER={USER}"
            f" GREENROOM_KAFKA_PASSWORD_FILE={_password_file(Path(folder))}\n\n"
            "Ctrl-C stops it, and its data goes with it.",
            flush=True,
        )
        stopping.wait()
        broker.stop()
        broker.remove()
    return 0


def _password_file(folder: Path) -> Path:
    path = folder / "password"
    path.write_text(PASSWORD)
    return path


if __name__ == "__main__":
    sys.exit(main())
