"""The in-process twin of server and channel: an address book whose stubs call the servicers themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from greenroom.fabric.rpc.dialer import S, StubKind
from greenroom.fabric.rpc.errors import Shape, as_status
from greenroom.fabric.rpc.exchange import Exchange
from greenroom.fabric.rpc.guard import Guard
from greenroom.fabric.rpc.local_call import LocalStreamCall, LocalUnaryCall
from greenroom.fabric.rpc.metadata import Metadata, Pairs
from greenroom.fabric.rpc.servicers import register

if TYPE_CHECKING:
    from greenroom.fabric.rpc.guard import Handler

_END_S = 5.0


class LocalDialer:
    """Servers and callers of one process, on one event loop."""

    def __init__(self) -> None:
        self._servers: dict[str, LocalServer] = {}
        self._waiting: dict[str, set[Callable[[], None]]] = {}
        self._calls: dict[str, set[Exchange]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def serve(
        self, address: str, servicers: Sequence[object], *, max_calls: int = 4096, shape: Shape = as_status
    ) -> LocalServer:
        """``servicers`` at ``address`` until the server is stopped. Raises ValueError where another is there."""
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
        for exchange in tuple(self._calls.get(address, ())):
            exchange.cancel("Channel closed.")

    async def close(self) -> None:
        """Cancels all calls, and waits until their handlers have ended."""
        handling = [exchange.handling for calls in self._calls.values() for exchange in calls if exchange.handling]
        for address in tuple(self._calls):
            await self.forget(address)
        if handling:
            await asyncio.wait(handling, timeout=_END_S)

    # -- what channels and servers call --------------------------------------------------------------------------

    def begin(self, exchange: Exchange, request: Any, wait_for_ready: bool) -> None:
        """Hand it to whoever serves its address."""
        calls = self._calls.setdefault(exchange.peer, set())
        calls.add(exchange)
        exchange.on_end.append(lambda: self._ended(exchange))
        server = self._servers.get(exchange.peer)
        if server is not None:
            server.take(exchange, request)
        elif wait_for_ready:
            self._wait(exchange, request)
        else:
            exchange.end(grpc.StatusCode.UNAVAILABLE, f"nobody serves {exchange.peer}")

    def _wait(self, exchange: Exchange, request: Any) -> None:
        def begin() -> None:
            if exchange.code is None:
                self._servers[exchange.peer].take(exchange, request)

        def give_up() -> None:
            waiting = self._waiting.get(exchange.peer)
            if waiting is not None:
                waiting.discard(begin)
                if not waiting:
                    del self._waiting[exchange.peer]

        self._waiting.setdefault(exchange.peer, set()).add(begin)
        exchange.on_end.append(give_up)

    def _ended(self, exchange: Exchange) -> None:
        calls = self._calls.get(exchange.peer)
        if calls is not None:
            calls.discard(exchange)
            if not calls:
                del self._calls[exchange.peer]

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
        self._running: dict[asyncio.Task[None], Exchange] = {}

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return len(self._running)

    def take(self, exchange: Exchange, request: Any) -> None:
        handler = self._methods.handlers.get(exchange.method)
        if handler is None:
            exchange.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        task = exchange.handle(handler, request)
        self._running[task] = exchange
        task.add_done_callback(self._running.pop)

    async def stop(self, grace_s: float) -> None:
        """As ``Server.stop``: nothing new, calls may end within ``grace_s``, then they are ended."""
        await self._guard.drain(grace_s)
        await self.kill()

    async def kill(self) -> None:
        """As if the process had died: callers see UNAVAILABLE at once."""
        self._dialer.withdraw(self)
        running = dict(self._running)
        for exchange in running.values():
            exchange.break_off(grpc.StatusCode.UNAVAILABLE, f"{self.address} is gone")
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

    def _exchange(self, metadata: Pairs | None, timeout: float | None) -> Exchange:
        pairs: Metadata = tuple(metadata or ())
        for key, _ in pairs:
            if key != key.lower():
                raise grpc.aio.InternalError(f"metadata was invalid: the key {key!r} is not in lower case")
        return Exchange(self._method, pairs, timeout, self._address)


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
        exchange = self._exchange(metadata, timeout)
        exchange.requests.close()
        self._dialer.begin(exchange, request, bool(wait_for_ready))
        return self._kind(exchange)


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
        exchange = self._exchange(metadata, timeout)
        if request_iterator is not None:
            exchange.send(request_iterator)
        self._dialer.begin(exchange, None, bool(wait_for_ready))
        return self._kind(exchange)
