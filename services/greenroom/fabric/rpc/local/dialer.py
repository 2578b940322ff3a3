"""The in-process twin of server and channel: stubs that call the servicers of an address directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from greenroom.fabric.rpc.dialer import S, StubKind
from greenroom.fabric.rpc.errors import Shape, as_status
from greenroom.fabric.rpc.guard import Guard
from greenroom.fabric.rpc.local.call_state import CallState
from greenroom.fabric.rpc.local.caller import LocalStreamCall, LocalUnaryCall
from greenroom.fabric.rpc.local.handler import handle
from greenroom.fabric.rpc.metadata import Metadata, Pairs
from greenroom.fabric.rpc.servicers import register

if TYPE_CHECKING:
    from greenroom.fabric.rpc.guard import Handler

_END_S = 5.0


class LocalDialer:
    """The servers of one process by address, for callers on the same event loop."""

    def __init__(self) -> None:
        self._servers: dict[str, LocalServer] = {}
        self._waiting: dict[str, set[Callable[[], None]]] = {}
        self._calls: dict[str, set[CallState]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def serve(
        self, address: str, servicers: Sequence[object], *, max_calls: int = 4096, shape: Shape = as_status
    ) -> LocalServer:
        """Serve ``servicers`` at ``address`` until the server is stopped. Raises ValueError where that is taken."""
        if address in self._servers:
            raise ValueError(f"{address} is served already")
        server = self._servers[address] = LocalServer(self, address, servicers, max_calls, shape)
        for begin in self._waiting.pop(address, ()):
            begin()
        return server

    def stub(self, kind: StubKind[S], address: str) -> S:
        channel: Any = _Channel(self, address)
        return kind(channel)

    async def forget(self, address: str) -> None:
        for call in tuple(self._calls.get(address, ())):
            call.cancel("Channel closed.")

    async def close(self) -> None:
        """Cancels all calls, and waits until their handlers have ended."""
        handling = [call.handling for calls in self._calls.values() for call in calls if call.handling]
        for address in tuple(self._calls):
            await self.forget(address)
        if handling:
            await asyncio.wait(handling, timeout=_END_S)

    # -- what channels and servers call --------------------------------------------------------------------------

    def begin(self, call: CallState, request: Any, wait_for_ready: bool) -> None:
        """Hand the call to the server at its address."""
        calls = self._calls.setdefault(call.peer, set())
        calls.add(call)
        call.on_end.append(lambda: self._ended(call))
        server = self._servers.get(call.peer)
        if server is not None:
            server.take(call, request)
        elif wait_for_ready:
            self._wait(call, request)
        else:
            call.end(grpc.StatusCode.UNAVAILABLE, f"nobody serves {call.peer}")

    def _wait(self, call: CallState, request: Any) -> None:
        def begin() -> None:
            if call.code is None:
                self._servers[call.peer].take(call, request)

        def give_up() -> None:
            waiting = self._waiting.get(call.peer)
            if waiting is not None:
                waiting.discard(begin)
                if not waiting:
                    del self._waiting[call.peer]

        self._waiting.setdefault(call.peer, set()).add(begin)
        call.on_end.append(give_up)

    def _ended(self, call: CallState) -> None:
        calls = self._calls.get(call.peer)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._calls[call.peer]

    def withdraw(self, server: LocalServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]


class LocalServer:
    """Servicers at an address of a LocalDialer; ``LocalDialer.serve`` makes it."""

    def __init__(
        self, dialer: LocalDialer, address: str, servicers: Sequence[object], max_calls: int, shape: Shape
    ) -> None:
        self.address = address
        self._dialer = dialer
        self._guard = Guard(max_calls=max_calls, shape=shape)
        self._methods = _Methods(self._guard)
        register(servicers, self._methods)
        self._running: dict[asyncio.Task[None], CallState] = {}

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return len(self._running)

    def take(self, call: CallState, request: Any) -> None:
        handler = self._methods.handlers.get(call.method)
        if handler is None:
            call.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        task = handle(call, handler, request)
        self._running[task] = call
        task.add_done_callback(self._running.pop)

    async def stop(self, grace_s: float) -> None:
        """As ``Server.stop``: take no new calls; running ones may end within ``grace_s``, then they are ended."""
        await self._guard.drain(grace_s)
        await self.kill()

    async def kill(self) -> None:
        """End as if the process had died: callers see UNAVAILABLE at once."""
        self._dialer.withdraw(self)
        running = dict(self._running)
        for call in running.values():
            call.break_off(grpc.StatusCode.UNAVAILABLE, f"{self.address} is gone")
        if running:
            await asyncio.wait(running, timeout=_END_S)


class _Methods:
    """Takes handlers as a grpc.aio server does."""

    def __init__(self, guard: Guard) -> None:
        self.handlers: dict[str, Handler] = {}
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods come by name too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self.handlers[method] = self._guard.wrap(method, handler)


class _Channel:
    """What a generated stub asks for its methods. Serializers are not used."""

    def __init__(self, dialer: LocalDialer, address: str) -> None:
        self._dialer = dialer
        self._address = address

    def unary_unary(self, method: str, **codec: object) -> _UnaryRequest:
        return _UnaryRequest(self._dialer, self._address, method, LocalUnaryCall)

    def unary_stream(self, method: str, **codec: object) -> _UnaryRequest:
        return _UnaryRequest(self._dialer, self._address, method, LocalStreamCall)

    def stream_unary(self, method: str, **codec: object) -> _StreamRequest:
        return _StreamRequest(self._dialer, self._address, method, LocalUnaryCall)

    def stream_stream(self, method: str, **codec: object) -> _StreamRequest:
        return _StreamRequest(self._dialer, self._address, method, LocalStreamCall)


class _Method:
    """A stub's method."""

    def __init__(
        self, dialer: LocalDialer, address: str, method: str, kind: type[LocalUnaryCall | LocalStreamCall]
    ) -> None:
        self._dialer = dialer
        self._address = address
        self._method = method
        self._kind = kind

    def _new_call(self, metadata: Pairs | None, timeout: float | None) -> CallState:
        pairs: Metadata = tuple(metadata or ())
        for key, _ in pairs:
            if key != key.lower():
                raise grpc.aio.InternalError(f"metadata was invalid: the key {key!r} is not in lower case")
        return CallState(self._method, pairs, timeout, self._address)


class _UnaryRequest(_Method):
    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Pairs | None = None,
        credentials: object = None,
        wait_for_ready: bool | None = None,
        compression: object = None,
    ) -> LocalUnaryCall | LocalStreamCall:
        call = self._new_call(metadata, timeout)
        call.requests.close()
        self._dialer.begin(call, request, bool(wait_for_ready))
        return self._kind(call)


class _StreamRequest(_Method):
    def __call__(
        self,
        request_iterator: AsyncIterable[Any] | Iterable[Any] | None = None,
        timeout: float | None = None,
        metadata: Pairs | None = None,
        credentials: object = None,
        wait_for_ready: bool | None = None,
        compression: object = None,
    ) -> LocalUnaryCall | LocalStreamCall:
        call = self._new_call(metadata, timeout)
        if request_iterator is not None:
            call.send(request_iterator)
        self._dialer.begin(call, None, bool(wait_for_ready))
        return self._kind(call)
