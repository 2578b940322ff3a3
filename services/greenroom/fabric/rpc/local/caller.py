"""A caller's side of a call within the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

import grpc

from greenroom.fabric.rpc.local.call_state import FINISHED, LOCALLY_CANCELLED, CallState
from greenroom.fabric.rpc.local.pipe import EOF

_COLLECTED = "Cancelled upon garbage collection!"


class LocalCall:
    """The caller's side of any call."""

    def __init__(self, state: CallState) -> None:
        self._state = state

    def __del__(self) -> None:
        state = self._state
        if state.code is None and not state.loop.is_closed():
            state.loop.call_soon_threadsafe(state.cancel, _COLLECTED)

    def cancel(self) -> bool:
        return self._state.cancel(LOCALLY_CANCELLED)

    def cancelled(self) -> bool:
        return self._state.locally_cancelled or self._state.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._state.done

    def time_remaining(self) -> float | None:
        return self._state.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        told = partial(callback, self)
        if self._state.code is not None:
            self._state.loop.call_soon(told)
        else:
            self._state.on_end.append(told)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._state.initial)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await asyncio.shield(self._state.ended)
        return grpc.aio.Metadata(*self._state.trailing)

    async def code(self) -> grpc.StatusCode:
        await asyncio.shield(self._state.ended)
        assert self._state.code is not None
        return self._state.code

    async def details(self) -> str:
        await asyncio.shield(self._state.ended)
        return self._state.details

    async def debug_error_string(self) -> str:
        return await self.details()

    async def wait_for_connection(self) -> None:
        if self._state.code is not None:
            self._state.raise_for_status()

    async def write(self, request: Any) -> None:
        state = self._state
        if state.code is not None:
            raise asyncio.InvalidStateError(FINISHED)
        if state.requests.closed:
            raise asyncio.InvalidStateError("RPC is half closed after calling done_writing().")
        try:
            taken = await state.requests.put(request)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not taken:
            state.raise_for_status()

    async def done_writing(self) -> None:
        self._state.requests.close()


class LocalUnaryCall(LocalCall):
    """One response."""

    def __await__(self) -> Generator[Any, None, Any]:
        state = self._state
        if state.code is None:
            try:
                yield from asyncio.shield(state.ended).__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        state.raise_for_status()
        return state.response


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
        state = self._state
        try:
            message = await state.responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is EOF:
            state.raise_for_status()
        return message
