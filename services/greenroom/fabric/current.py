"""What the running task works on."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request's id; empty where there is none. It goes into log lines and, by ``rpc.outgoing``, along with calls."""
