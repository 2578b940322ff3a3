"""The request that the running task works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request's id; empty where there is none. Log lines have it, and ``rpc.outgoing`` sends it along with calls."""


def fresh_context(of: str = "") -> Context:
    """The context of a task that works on the request ``of``, or on none. It inherits nothing from the task that starts
    it."""
    context = Context()
    if of:
        context.run(request_id.set, of)
    return context


@contextmanager
def working_on(request: str) -> Iterator[None]:
    """Within it, the running task works on ``request``, or on none where that is empty."""
    token = request_id.set(request)
    try:
        yield
    finally:
        request_id.reset(token)
