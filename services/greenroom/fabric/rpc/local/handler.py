"""The handler's side of a call within the process: its context, and the task that it runs in."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from greenroom.fabric.rpc.local.call_state import FINISHED, CallState
from greenroom.fabric.rpc.local.pipe import EOF, Pipe
from greenroom.fabric.rpc.metadata import Metadata

if TYPE_CHECKING:
    from greenroom.fabric.rpc.guard import Handler

_LOG = logging.getLogger(__name__)


class LocalContext(grpc.aio.ServicerContext[Any, Any]):
    """A handler's context. As on the network, ``cancelled`` tells only of what the handler itself has set. A handler
    notices a caller that cancels by CancelledError and by ``add_done_callback``."""

    def __init__(self, call: CallState) -> None:
        self._call = call
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
        self.status_code = code
        self._call.end(code, details or self.status_details, tuple(trailing_metadata) or self.trailing)
        raise self._aborted

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> Any:
        self._raise_if_ended()
        return await self._call.requests.get()

    async def write(self, message: Any) -> None:
        self._raise_if_ended()
        await self._call.responses.put(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._raise_if_ended()
        self._call.initial = tuple(initial_metadata)

    def _raise_if_ended(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        if self._call.code is not None:
            raise grpc.aio.UsageError(FINISHED)

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(partial(callback, self))

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self.trailing

    def invocation_metadata(self) -> Any:
        return self._call.metadata

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
        return f"local:{self._call.peer}"

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def time_remaining(self) -> Any:
        return self._call.time_remaining()

    def cancelled(self) -> bool:
        return self.status_code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._call.code is not None


def handle(call: CallState, handler: Handler, request: Any) -> asyncio.Task[None]:
    """Runs the handler in a task that has nothing of the caller's context, as in another process."""
    context = LocalContext(call)
    call.handling = call.loop.create_task(
        _handle(call, handler, request, context), name=f"handler of {call.method}", context=contextvars.Context()
    )
    call.handling.add_done_callback(context.finished)
    if call.code is not None:
        call.handling.cancel()
    return call.handling


async def _handle(call: CallState, handler: Handler, request: Any, context: LocalContext) -> None:
    given = _Requests(call.requests) if handler.request_streaming else request
    try:
        if handler.response_streaming:
            await _behaviour(handler)(given, context)
        else:
            call.response = await _behaviour(handler)(given, context)
        call.end(context.status_code, context.status_details, context.trailing)
    except grpc.aio.AbortError:
        pass
    except asyncio.CancelledError:
        call.break_off(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        raise
    except Exception:
        _LOG.exception("%s failed", call.method)
        call.end(grpc.StatusCode.UNKNOWN, "the handler failed")


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


def _behaviour(handler: Handler) -> Any:
    if handler.response_streaming:
        return handler.stream_stream if handler.request_streaming else handler.unary_stream
    return handler.stream_unary if handler.request_streaming else handler.unary_unary
