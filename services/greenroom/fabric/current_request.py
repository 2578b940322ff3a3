"""What the running task works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request's id; empty where there is none. It goes into log lines and, by ``rpc.outgoing``, along with calls."""


def fresh_context(of: str = "") -> Context:
    """For a task that works on the request ``of``, or on none: nothing of whatever the task that starts it works on."""
    context = Context()
    if of:
        context.run(request_id.set, of)
    return context


@contextmanager
def working_on(request: str) -> Iterator[None]:
    """Within it, the running task works on that request, or on none."""
    token = request_id.set(request)
    try:
        yield
    finally:
        request_id.reset(token)
