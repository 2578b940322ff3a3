"""Wraps every handler of a server, on the network and in the process: errors as statuses, a limit, a bounded end."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from greenroom.fabric import telemetry
from greenroom.fabric.current_request import request_id
from greenroom.fabric.rpc.errors import DEFECT, MAX_MESSAGE_CHARS, Shape, Status, as_status
from greenroom.fabric.rpc.metadata import REQUEST_ID, VALID_ID, Context, received, value_of
from greenroom.fabric.rpc.spans import code_of, told

_LOG = logging.getLogger(__name__)
_CANCEL_S = 5.0
_FULL = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once", "saturated", 1.0)
_STOPPING = Status(grpc.StatusCode.UNAVAILABLE, "this server is stopping; call another", "stopping")
if TYPE_CHECKING:  # generic for mypy only
    Handler = grpc.RpcMethodHandler[Any, Any]


class Guard:
    """One for each server. ``max_calls``: calls at once; more are refused. ``shape``: the status of an error.

    A handler that raises one of greenroom's errors ends its call with the status that ``shape`` gives. Any other error
    ends it with INTERNAL, and its text goes to the log alone. An async generator is closed when its call ends, in
    whatever way.
    """

    def __init__(self, *, max_calls: int, shape: Shape = as_status) -> None:
        self._max_calls = max_calls
        self._shape = shape
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopped: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._wrapped: dict[str, Handler] = {}

    @property
    def calls(self) -> int:
        """How many are under way."""
        return len(self._calls)

    async def drain(self, grace_s: float) -> None:
        """Take no new calls. Running ones may end within ``grace_s``; then they are cancelled, and their callers are
        told UNAVAILABLE."""
        self._draining = True
        await self._until_idle(grace_s)
        self._stopped |= self._calls
        for task in self._stopped:
            task.cancel()
        if not await self._until_idle(_CANCEL_S):
            _LOG.error("%d calls do not end although they were cancelled", len(self._calls))

    async def _until_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def wrap(self, method: str, handler: Handler) -> Handler:
        """``handler`` behind this guard; the same for the same method."""
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        make: Any
        inner: Any  # typed for threads, not for asyncio
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
            case True, False:
                make, inner = grpc.stream_unary_rpc_method_handler, handler.stream_unary
            case False, True:
                make, inner = grpc.unary_stream_rpc_method_handler, _writing(handler.unary_stream)
            case _:
                make, inner = grpc.stream_stream_rpc_method_handler, _writing(handler.stream_stream)

        # A coroutine function in itself, since grpc looks whether it is one.
        async def behaviour(request: Any, context: Context) -> Any:
            return await self._run(method, inner, request, context)

        wrapped: Handler = make(behaviour, **codec)
        return wrapped

    async def _run(self, method: str, behaviour: Any, request: Any, context: Context) -> Any:
        if self._draining:
            await _end(context, _STOPPING)
        if len(self._calls) >= self._max_calls:
            await _end(context, _FULL)
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self._idle.clear()
        metadata = received(context)
        _note_request(value_of(metadata, REQUEST_ID))
        parent = telemetry.extract(metadata)
        # A call that is part of no trace begins none.
        span = telemetry.Span() if parent is None else telemetry.begin(method, parent=parent, kind="server")
        try:
            with span.active():
                return await self._answer(method, behaviour, request, context, span)
        finally:
            span.end()
            self._calls.discard(task)
            self._stopped.discard(task)
            if not self._calls:
                self._idle.set()

    async def _answer(self, method: str, behaviour: Any, request: Any, context: Context, span: telemetry.Span) -> Any:
        try:
            reply = await behaviour(request, context)
        except grpc.aio.AbortError:
            told(span, code_of(context))
            raise
        except asyncio.CancelledError:
            if asyncio.current_task() in self._stopped and not context.done():
                await _end(context, _STOPPING, span)
            told(span, grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            if context.done():
                told(span, code_of(context))
                raise  # it ended its call itself and failed afterwards
            status = self._shape(error)
            if status is None:
                _LOG.exception("%s failed%s", method, f" on {request_id.get()}" if request_id.get() else "")
                status = DEFECT
            await _end(context, status, span)
        told(span, code_of(context))
        return reply


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """The guard on a grpc.aio server. ``exempt``: services that must answer also while it is full or ending."""

    def __init__(self, guard: Guard, exempt: frozenset[str]) -> None:
        self._guard = guard
        self._exempt = exempt

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.split("/")[1] in self._exempt:
            return handler
        return self._guard.wrap(method, handler)


def _writing(behaviour: Any) -> Callable[[Any, Context], Any]:
    """A streaming behaviour, generator or coroutine, as a coroutine that writes."""

    @functools.wraps(behaviour)
    async def write_all(request: Any, context: Context) -> None:
        result = behaviour(request, context)
        if not hasattr(result, "__aiter__"):
            await result
            return
        messages: AsyncIterator[Any] = aiter(result)
        try:
            async for message in messages:
                await context.write(message)
        finally:
            close = getattr(messages, "aclose", None)
            if close is not None:
                await close()

    return write_all


async def _end(context: Context, status: Status, span: telemetry.Span | None = None) -> NoReturn:
    """Raises AbortError, which ends the handler."""
    if span is not None:
        told(span, status.code, status.word)
    await context.abort(status.code, status.message[:MAX_MESSAGE_CHARS], status.trailing)


def _note_request(given: str | None) -> None:
    """The task is the call's own, so the former value need not be restored."""
    if given is not None and VALID_ID.fullmatch(given):
        request_id.set(given)
