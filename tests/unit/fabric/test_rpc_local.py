"""What only the in-process twin does."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from greenroom.fabric.rpc import Context, LocalDialer
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer, EchoStub
from tests.contract.rpc.waits import Waits
from tests.contract.rpc.wires import DEADLINE_S
from tests.waiting import until


async def test_messages_are_passed_as_they_are() -> None:
    class Keeps(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            return request

    async with LocalDialer() as dialer:
        server = dialer.serve("here", [Keeps()])
        echo = Echo(value=b"a")
        assert await dialer.stub(EchoStub, "here").Unary(echo) is echo
        await server.stop(0.0)


async def test_a_call_without_references_is_cancelled() -> None:
    async with LocalDialer() as dialer:
        server = dialer.serve("here", [servicer := Waits()])

        async def drop() -> None:
            async for _ in dialer.stub(EchoStub, "here").Down(Echo(value=b"a")):
                break

        await drop()

        def gone() -> bool:
            gc.collect()
            return servicer.closed == 1

        await until(gone, "the handler was cancelled")
        await server.stop(0.0)


async def test_a_server_that_is_killed_is_gone_at_once() -> None:
    async with LocalDialer() as dialer:
        server = dialer.serve("here", [servicer := Waits()])
        stub = dialer.stub(EchoStub, "here")
        call = stub.Unary(Echo(), timeout=DEADLINE_S)
        await until(lambda: servicer.running == 1, "the handler runs")
        await server.kill()
        for attempt in (call, stub.Unary(Echo())):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await attempt
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert servicer.cancelled == 1
        dialer.serve("here", [EchoServicer()])
        assert (await stub.Unary(Echo(value=b"anew"))).value == b"anew"


async def test_closing_the_dialer_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with LocalDialer() as dialer:
        dialer.serve("here", [servicer := Waits()])
        stub = dialer.stub(EchoStub, "here")
        calls = [stub.Unary(Echo()) for _ in range(3)]
        streams = [stub.Both() for _ in range(3)]
        waiting = dialer.stub(EchoStub, "nowhere").Unary(Echo(), wait_for_ready=True)
        await until(lambda: servicer.running == 6, "the handlers run")
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}
    assert servicer.running == 0
    for call in (*calls, waiting):
        with pytest.raises(asyncio.CancelledError):
            await call
    assert all(stream.cancelled() for stream in streams)


async def test_a_timeout_of_nothing() -> None:
    async with LocalDialer() as dialer:
        dialer.serve("here", [Waits()])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await dialer.stub(EchoStub, "here").Unary(Echo(), timeout=0)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
