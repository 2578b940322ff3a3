"""A service whose handlers go on until they are stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from greenroom.fabric.rpc import Context
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer


class Waits(EchoServicer):
    """Handlers that go on until they are stopped, and note how that comes to them."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0
        self.closed = 0
        self.told = 0
        self.sent = 0
        self.go_on = asyncio.Event()

    def _tell(self, context: Context) -> None:
        def told(ctx: object) -> None:
            self.told += 1

        context.add_done_callback(told)  # type: ignore[arg-type]  # of grpc's types

    async def _wait(self, context: Context) -> None:
        self._tell(context)
        self.running += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Unary(self, request: Echo, context: Context) -> Echo:
        await self._wait(context)
        return request

    async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
        try:
            yield request
            await self._wait(context)
            yield request
        finally:
            self.closed += 1

    async def Up(self, request_iterator: AsyncIterator[Echo], context: Context) -> Echo:
        await self._wait(context)
        return Echo()

    async def Both(self, request_iterator: AsyncIterator[Echo], context: Context) -> AsyncIterator[Echo]:
        self._tell(context)
        self.running += 1
        try:
            async for request in request_iterator:
                yield request
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.closed += 1
            self.running -= 1
