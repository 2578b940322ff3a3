"""One call within the process: what caller and handler share.

What is seen of it is what grpc.aio shows; tests/contract/rpc runs the same suite over both. Messages are passed as
they are, not copied: the sender of a message leaves it alone afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

import grpc

from greenroom.fabric.rpc.local.pipe import Pipe
from greenroom.fabric.rpc.metadata import Metadata

_LOG = logging.getLogger(__name__)
_BUFFER = 16
FINISHED = "RPC already finished."
LOCALLY_CANCELLED = "Locally cancelled by application!"
_EXPIRED = "Deadline Exceeded"


class CallState:
    """What caller and handler share. The call has ended once ``code`` is set, which happens once."""

    def __init__(self, method: str, metadata: Metadata, timeout: float | None, peer: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.method = method
        self.metadata = metadata
        self.peer = peer
        self.requests = Pipe(self.loop, _BUFFER)
        self.responses = Pipe(self.loop, _BUFFER)
        self.response: Any = None
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: Metadata = ()
        self.initial: Metadata = ()
        self.locally_cancelled = False
        self.ended = self.loop.create_future()
        self.handling: asyncio.Task[None] | None = None
        self.sending: asyncio.Task[None] | None = None
        self.on_end: list[Callable[[], None]] = []
        self.deadline = None if timeout is None else self.loop.time() + timeout
        self._timer = None if timeout is None else self.loop.call_later(max(0.0, timeout), self._expire)

    @property
    def done(self) -> bool:
        """Whether the call has ended for the caller: it reads all responses before the end."""
        return self.code is not None and not len(self.responses)

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - self.loop.time())

    def cancel(self, details: str) -> bool:
        """The caller cancels. Returns whether there was anything to cancel."""
        if self.done:
            return False
        self.locally_cancelled = True
        self.responses.close(discard=True)
        self.break_off(grpc.StatusCode.CANCELLED, details)
        return True

    def break_off(self, code: grpc.StatusCode, details: str) -> None:
        """End the call, if it has not ended, and cancel the handler."""
        if self.code is None:
            self.responses.close(discard=True)
            self.end(code, details)
            if self.handling is not None:
                self.handling.cancel()

    def end(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """End the call, if it has not ended."""
        if self.code is not None:
            return
        self.code, self.details, self.trailing = code, details, trailing
        if self._timer is not None:
            self._timer.cancel()
        self.requests.close(discard=True)
        self.responses.close()
        if self.sending is not None and self.sending is not asyncio.current_task(self.loop):
            self.sending.cancel()
        self.ended.set_result(None)
        for told in self.on_end:
            told()
        self.on_end.clear()

    def _expire(self) -> None:
        self.break_off(grpc.StatusCode.DEADLINE_EXCEEDED, _EXPIRED)

    def raise_for_status(self) -> None:
        """Raises the error that the call ended with, unless it is OK."""
        if self.locally_cancelled:
            raise asyncio.CancelledError
        if self.code is not grpc.StatusCode.OK:
            assert self.code is not None
            raise grpc.aio.AioRpcError(
                self.code,
                grpc.aio.Metadata(*self.initial),
                grpc.aio.Metadata(*self.trailing),
                details=self.details,
                debug_error_string=f"{self.method} at {self.peer}: {self.details}",
            )

    # -- the caller's requests -----------------------------------------------------------------------------------

    def send(self, iterator: AsyncIterable[Any] | Iterable[Any]) -> None:
        self.sending = self.loop.create_task(self._send(iterator), name=f"requests of {self.method}")

    async def _send(self, iterator: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(iterator, AsyncIterable):
                async for request in iterator:
                    if not await self.requests.put(request):
                        return
            else:
                for request in iterator:
                    if not await self.requests.put(request):
                        return
            self.requests.close()
        except asyncio.CancelledError:
            self.break_off(grpc.StatusCode.CANCELLED, LOCALLY_CANCELLED)
            raise
        except Exception:
            _LOG.warning("the requests of a call of %s broke off", self.method, exc_info=True)
            self.cancel(LOCALLY_CANCELLED)
