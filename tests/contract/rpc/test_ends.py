"""How calls end before their time: cancelled, expired, dropped, held up, or with their server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from greenroom.fabric.rpc import Context, reading, retry_after_of, word_of
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer
from tests.contract.rpc.waits import Waits
from tests.contract.rpc.wires import DEADLINE_S, Wire, drained, settled
from tests.waiting import until

_LARGE = Echo(value=bytes(32 * 1024))
_MANY = 5_000  # of large ones: more than any window holds


async def _for_ever() -> AsyncIterator[Echo]:
    yield Echo(value=b"first")
    await asyncio.Event().wait()


# -- cancelled ---------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_seen_by_its_handler(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    call = wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    await until(lambda: servicer.running == 1, "the handler runs")
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert call.cancelled()
    assert not call.cancel()
    await until(lambda: servicer.cancelled == 1 and servicer.told == 1, "the handler was cancelled and told")


async def test_a_cancelled_caller_cancels_its_call(wire: Wire) -> None:
    await wire.serve(servicer := Waits())

    async def calls() -> None:
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)

    caller = asyncio.create_task(calls())
    await until(lambda: servicer.running == 1, "the handler runs")
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: servicer.cancelled == 1, "the handler was cancelled")


async def test_a_cancelled_stream(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    call = wire.stub().Down(Echo(value=b"a"), timeout=DEADLINE_S)
    responses = aiter(call)
    assert (await anext(responses)).value == b"a"
    await until(lambda: servicer.running == 1, "the handler runs")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(responses)
    await until(lambda: servicer.cancelled == servicer.closed == servicer.told == 1, "the generator was closed")


async def test_a_handler_that_only_writes_hears_of_the_end_too(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    class Floods(Waits):
        async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
            try:
                while True:
                    yield request
            finally:
                self.closed += 1

    await wire.serve(servicer := Floods())
    call = wire.stub().Down(Echo(value=b"a"), timeout=DEADLINE_S)
    responses = aiter(call)
    for _ in range(100):
        await anext(responses)
    call.cancel()
    await until(lambda: servicer.closed == 1 and wire.calls == 0, "the handler has ended")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_cancelled_reader_cancels_its_stream(wire: Wire) -> None:
    await wire.serve(servicer := Waits())

    async def reads() -> None:
        async for _ in wire.stub().Both(_for_ever(), timeout=DEADLINE_S):
            pass

    reader = asyncio.create_task(reads())
    await until(lambda: servicer.running == 1, "the handler runs")
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await until(lambda: servicer.closed == servicer.told == 1, "the handler has ended")


async def test_a_dropped_iterator_cancels_nothing_but_reading_does(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    async with reading(wire.stub().Down(Echo(value=b"a"), timeout=DEADLINE_S)) as responses:
        async for _ in responses:
            break
        await until(lambda: servicer.running == 1, "the handler runs on")
    await until(lambda: servicer.cancelled == servicer.closed == 1, "the handler was cancelled")


async def test_requests_that_break_off_cancel_the_call(wire: Wire) -> None:
    await wire.serve(servicer := Waits())

    answered = asyncio.Event()

    async def broken() -> AsyncIterator[Echo]:
        yield Echo(value=b"a")
        await answered.wait()
        raise ValueError("no more")

    responses = aiter(wire.stub().Both(broken(), timeout=DEADLINE_S))
    await anext(responses)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await anext(responses)
    await until(lambda: servicer.closed == 1 and not servicer.running, "the handler has ended")


async def test_forgetting_an_address_cancels_its_calls(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    call = wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    await until(lambda: servicer.running == 1, "the handler runs")
    await wire.dialer.forget(wire.address)
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: servicer.cancelled == 1, "the handler was cancelled")
    servicer.go_on.set()
    await wire.stub().Unary(Echo(), timeout=DEADLINE_S)


# -- expired -----------------------------------------------------------------------------------------------------


async def test_the_deadline_ends_a_call_on_both_sides(wire: Wire) -> None:
    left: list[float | None] = []

    class Looks(Waits):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            left.append(context.time_remaining())
            return await super().Unary(request, context)

    await wire.serve(servicer := Looks())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Unary(Echo(), timeout=0.2)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert left[0] is not None
    assert 0 < left[0] <= 0.201, "the wire rounds up to a millisecond"
    await until(lambda: servicer.cancelled == 1, "the handler was cancelled")


async def test_the_deadline_ends_a_stream(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    call = wire.stub().Down(Echo(value=b"a"), timeout=0.3)
    got, failure = await drained(call)
    assert [echo.value for echo in got] == [b"a"]
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: servicer.closed == 1, "the handler has ended")


async def test_without_a_deadline_none_remains(wire: Wire) -> None:
    left: list[float | None] = []

    class Looks(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            left.append(context.time_remaining())
            return request

    await wire.serve(Looks())
    await wire.stub().Unary(Echo())
    assert left == [None]


# -- held up -----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_holds_up_the_handler(wire: Wire) -> None:
    class Floods(Waits):
        async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
            for _ in range(_MANY):
                self.sent += 1
                yield _LARGE

    await wire.serve(servicer := Floods())
    call = wire.stub().Down(Echo(), timeout=6 * DEADLINE_S)
    responses = aiter(call)
    await anext(responses)
    ahead = await settled(lambda: servicer.sent)
    assert ahead < _MANY / 5
    for _ in range(ahead):
        await anext(responses)
    await until(lambda: servicer.sent > ahead, "it goes on once it is read")
    call.cancel()


async def test_a_slow_handler_holds_up_the_writer(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    written = 0

    async def writes() -> AsyncIterator[Echo]:
        nonlocal written
        for _ in range(_MANY):
            written += 1
            yield _LARGE

    call = wire.stub().Up(writes(), timeout=6 * DEADLINE_S)
    await until(lambda: servicer.running == 1, "the handler runs")
    assert await settled(lambda: written) < _MANY / 5
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


# -- with their server -------------------------------------------------------------------------------------------


async def test_a_stopping_server_lets_calls_end_and_takes_no_more(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    stub = wire.stub()
    under_way = stub.Unary(Echo(value=b"under way"), timeout=DEADLINE_S)
    await until(lambda: servicer.running == 1, "the handler runs")
    stopping = asyncio.create_task(wire.stop(DEADLINE_S))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert word_of(raised.value) == "stopping"
    servicer.go_on.set()
    assert (await under_way).value == b"under way"
    await stopping
    assert servicer.cancelled == 0


async def test_what_does_not_end_in_time_is_ended(wire: Wire) -> None:
    await wire.serve(servicer := Waits())
    stub = wire.stub()
    one = stub.Unary(Echo(), timeout=DEADLINE_S)
    stream = stub.Both(_for_ever(), timeout=DEADLINE_S)
    responses = aiter(stream)
    await anext(responses)
    await until(lambda: servicer.running == 2, "both handlers run")
    await wire.stop(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await one
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(responses)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert servicer.cancelled == 2
    assert servicer.running == 0


async def test_after_its_end_a_server_answers_no_call(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    stub = wire.stub()
    await stub.Unary(Echo(), timeout=DEADLINE_S)
    await wire.stop(1.0)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_comes_back_is_reached_by_the_same_stub(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    stub = wire.stub()
    await stub.Unary(Echo(), timeout=DEADLINE_S)
    await wire.stop(1.0)
    await wire.serve(EchoServicer())
    back = await stub.Unary(Echo(value=b"back"), wait_for_ready=True, timeout=3 * DEADLINE_S)
    assert back.value == b"back"


async def test_more_calls_than_it_takes_are_refused(wire: Wire) -> None:
    await wire.serve(servicer := Waits(), max_calls=2)
    stub = wire.stub()
    taken = [stub.Unary(Echo(), timeout=DEADLINE_S) for _ in range(2)]
    await until(lambda: servicer.running == 2, "both handlers run")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert word_of(raised.value) == "saturated"
    assert retry_after_of(raised.value) == 1.0
    servicer.go_on.set()
    await asyncio.gather(*taken)
    await stub.Unary(Echo(), timeout=DEADLINE_S)
