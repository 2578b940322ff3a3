"""The access log: one line for each HTTP request and each RPC."""

from __future__ import annotations

import logging

ACCESS_LOG = logging.getLogger("greenroom.gateway.access")


def fields(
    *, key: str | None, request_id: str | None, error: str | None, param: str | None, user: str | None = None
) -> str:
    """The end of a line: what is known of the request, each with its name. What a client has chosen is quoted and cut.

    ``key``: the caller's name. ``error``: the code of what the client was told; ``param``: the field at fault.
    """
    known = {
        "key": key,
        "id": request_id,
        "error": error,
        "param": f"{param!r:.80}" if param else None,
        "user": f"{user!r:.80}" if user else None,
    }
    return "".join(f" {name}={value}" for name, value in known.items() if value)
