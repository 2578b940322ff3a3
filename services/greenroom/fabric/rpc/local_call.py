"""A caller's side of a call within the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

import grpc

from greenroom.fabric.rpc.exchange import LOCALLY_CANCELLED, Exchange
from greenroom.fabric.rpc.local_context import FINISHED
from greenroom.fabric.rpc.pipe import EOF

_COLLECTED = "Cancelled upon garbage collection!"


class LocalCall:
    """The caller's side of any call."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __del__(self) -> None:
        exchange = self._exchange
        if exchange.code is None and not exchange.loop.is_closed():
            exchange.loop.call_soon_threadsafe(exchange.cancel, _COLLECTED)

    def cancel(self) -> bool:
        return self._exchange.cancel(LOCALLY_CANCELLED)

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
            raise asyncio.InvalidStateError(FINISHED)
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
