"""One call within the process: what both ends share, the caller's object, and the handler's context.

What is seen of it is what grpc.aio shows; tests/contract/rpc runs the same suite over both. Messages are passed as
they are, not copied: whoever has sent one leaves it alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from greenroom.fabric.rpc.metadata import Metadata
from greenroom.fabric.rpc.pipe import EOF, Pipe

if TYPE_CHECKING:
    from greenroom.fabric.rpc.guard import Handler

_LOG = logging.getLogger(__name__)
_BUFFER = 16
_CANCELLED = "Locally cancelled by application!"
_COLLECTED = "Cancelled upon garbage collection!"
_EXPIRED = "Deadline Exceeded"
_FINISHED = "RPC already finished."


class Exchange:
    """What caller and handler share. It has ended once ``code`` is set, which happens once."""

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
        """As the caller sees it: what was sent before the end comes before it."""
        return self.code is not None and not len(self.responses)

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - self.loop.time())

    def cancel(self, details: str) -> bool:
        """By the caller. Whether there was anything to cancel."""
        if self.done:
            return False
        self.locally_cancelled = True
        self.responses.close(discard=True)
        self.break_off(grpc.StatusCode.CANCELLED, details)
        return True

    def break_off(self, code: grpc.StatusCode, details: str) -> None:
        """End it, if it has not ended, whatever the handler does, which is cancelled."""
        if self.code is None:
            self.responses.close(discard=True)
            self.end(code, details)
            if self.handling is not None:
                self.handling.cancel()

    def end(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Does nothing if it has ended before."""
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
        """Raises what the call ended with, unless that is OK."""
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

    # -- the two tasks of a call ---------------------------------------------------------------------------------

    def handle(self, handler: Handler, request: Any) -> asyncio.Task[None]:
        """Runs the handler, with nothing of the caller's context, as it would be in another process."""
        context = LocalContext(self)
        self.handling = self.loop.create_task(
            self._handle(handler, request, context), name=f"handler of {self.method}", context=contextvars.Context()
        )
        self.handling.add_done_callback(context.finished)
        if self.code is not None:
            self.handling.cancel()
        return self.handling

    async def _handle(self, handler: Handler, request: Any, context: LocalContext) -> None:
        given = _Requests(self.requests) if handler.request_streaming else request
        try:
            if handler.response_streaming:
                await _behaviour(handler)(given, context)
            else:
                self.response = await _behaviour(handler)(given, context)
            self.end(context.status_code, context.status_details, context.trailing)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self.break_off(grpc.StatusCode.CANCELLED, "the handler was cancelled")
            raise
        except Exception:
            _LOG.exception("%s failed", self.method)
            self.end(grpc.StatusCode.UNKNOWN, "the handler failed")

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
            self.break_off(grpc.StatusCode.CANCELLED, _CANCELLED)
            raise
        except Exception:
            _LOG.warning("the requests of a call of %s broke off", self.method, exc_info=True)
            self.cancel(_CANCELLED)


class _Requests:
    """What a handler reads its requests from."""

    __slots__ = ("_pipe",)

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = await self._pipe.get()
        if message is EOF:
            raise StopAsyncIteration
        return message


class LocalContext(grpc.aio.ServicerContext[Any, Any]):
    """A handler's side. As on the network ``cancelled`` says only what the handler itself has set: a caller that
    cancels is noticed by CancelledError and by ``add_done_callback``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._aborted: grpc.aio.AbortError | None = None
        self._callbacks: list[Callable[[], object]] = []
        self.status_code = grpc.StatusCode.OK
        self.status_details = ""
        self.trailing: Metadata = ()

    def finished(self, task: asyncio.Task[None]) -> None:
        for callback in self._callbacks:
            callback()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        if self._aborted is not None:
            raise grpc.aio.UsageError("Abort already called!")
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, "an abort can not be OK"
        self._aborted = grpc.aio.AbortError("Locally aborted.")
        self._exchange.end(code, details or self.status_details, tuple(trailing_metadata) or self.trailing)
        raise self._aborted

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> Any:
        self._raise_if_ended()
        return await self._exchange.requests.get()

    async def write(self, message: Any) -> None:
        self._raise_if_ended()
        await self._exchange.responses.put(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._raise_if_ended()
        self._exchange.initial = tuple(initial_metadata)

    def _raise_if_ended(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        if self._exchange.code is not None:
            raise grpc.aio.UsageError(_FINISHED)

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(partial(callback, self))

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self.trailing

    def invocation_metadata(self) -> Any:
        return self._exchange.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status_code = code

    def code(self) -> grpc.StatusCode:
        return self.status_code

    def set_details(self, details: str) -> None:
        self.status_details = details

    def details(self) -> str:
        return self.status_details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing is compressed here."""

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed here."""

    def peer(self) -> str:
        return f"local:{self._exchange.peer}"

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def time_remaining(self) -> Any:
        return self._exchange.time_remaining()

    def cancelled(self) -> bool:
        return self.status_code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._exchange.code is not None


class LocalCall:
    """The caller's side of any call."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __del__(self) -> None:
        exchange = self._exchange
        if exchange.code is None and not exchange.loop.is_closed():
            exchange.loop.call_soon_threadsafe(exchange.cancel, _COLLECTED)

    def cancel(self) -> bool:
        return self._exchange.cancel(_CANCELLED)

    def cancelled(self) -> bool:
        return self._exchange.locally_cancelled or self._exchange.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._exchange.done

    def time_remaining(self) -> float | None:
        return self._exchange.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        told = partial(callback, self)
        if self._exchange.code is not None:
            self._exchange.loop.call_soon(told)
        else:
            self._exchange.on_end.append(told)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._exchange.initial)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await asyncio.shield(self._exchange.ended)
        return grpc.aio.Metadata(*self._exchange.trailing)

    async def code(self) -> grpc.StatusCode:
        await asyncio.shield(self._exchange.ended)
        assert self._exchange.code is not None
        return self._exchange.code

    async def details(self) -> str:
        await asyncio.shield(self._exchange.ended)
        return self._exchange.details

    async def debug_error_string(self) -> str:
        return await self.details()

    async def wait_for_connection(self) -> None:
        if self._exchange.code is not None:
            self._exchange.raise_for_status()

    async def write(self, request: Any) -> None:
        exchange = self._exchange
        if exchange.code is not None:
            raise asyncio.InvalidStateError(_FINISHED)
        if exchange.requests.closed:
            raise asyncio.InvalidStateError("RPC is half closed after calling done_writing().")
        try:
            taken = await exchange.requests.put(request)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not taken:
            exchange.raise_for_status()

    async def done_writing(self) -> None:
        self._exchange.requests.close()


class LocalUnaryCall(LocalCall):
    """One response."""

    def __await__(self) -> Generator[Any, None, Any]:
        exchange = self._exchange
        if exchange.code is None:
            try:
                yield from asyncio.shield(exchange.ended).__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        exchange.raise_for_status()
        return exchange.response


class LocalStreamCall(LocalCall):
    """Responses one after another."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        exchange = self._exchange
        try:
            message = await exchange.responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is EOF:
            exchange.raise_for_status()
        return message


def _behaviour(handler: Handler) -> Any:
    if handler.response_streaming:
        return handler.stream_stream if handler.request_streaming else handler.unary_stream
    return handler.stream_unary if handler.request_streaming else handler.unary_unary
