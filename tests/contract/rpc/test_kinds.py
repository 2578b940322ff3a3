"""The four kinds of calls, what goes along with them, and many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from greenroom.fabric.current_request import request_id
from greenroom.fabric.rpc import Context, outgoing, received, value_of
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer
from tests.contract.rpc.wires import DEADLINE_S, Wire
from tests.waiting import until


def _echoes(*values: bytes) -> list[Echo]:
    return [Echo(value=value) for value in values]


async def _given(*values: bytes) -> AsyncIterator[Echo]:
    for echo in _echoes(*values):
        yield echo


async def test_one_request_one_response(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    assert (await wire.stub().Unary(Echo(value=b"hello"), timeout=DEADLINE_S)).value == b"hello"


async def test_one_request_many_responses(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    call = wire.stub().Down(Echo(value=b"abc"), timeout=DEADLINE_S)
    assert [echo.value async for echo in call] == [b"a", b"b", b"c"]
    assert await call.code() is grpc.StatusCode.OK
    assert call.done()


async def test_no_response_at_all(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    assert [echo async for echo in wire.stub().Down(Echo(), timeout=DEADLINE_S)] == []


async def test_many_requests_one_response(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    assert (await wire.stub().Up(_given(b"a", b"b"), timeout=DEADLINE_S)).value == b"ab"


async def test_requests_from_a_plain_iterator(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    plain: Iterator[Echo] = iter(_echoes(b"a", b"b"))
    assert (await wire.stub().Up(plain, timeout=DEADLINE_S)).value == b"ab"


async def test_many_requests_many_responses(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    call = wire.stub().Both(_given(b"a", b"b", b"c"), timeout=DEADLINE_S)
    assert [echo.value async for echo in call] == [b"a", b"b", b"c"]


async def test_question_and_answer_in_turns(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    call = wire.stub().Both(timeout=DEADLINE_S)
    for value in (b"a", b"b"):
        await call.write(Echo(value=value))
        answer = await call.read()
        assert isinstance(answer, Echo)
        assert answer.value == value
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_a_handler_may_read_and_write_instead_of_iterate(wire: Wire) -> None:
    class Writes(EchoServicer):
        async def Both(self, request_iterator: AsyncIterator[Echo], context: Context) -> None:  # type: ignore[override]
            while (request := await context.read()) is not grpc.aio.EOF:
                await context.write(request)
                await context.write(request)

    await wire.serve(Writes())
    call = wire.stub().Both(_given(b"a", b"b"), timeout=DEADLINE_S)
    assert [echo.value async for echo in call] == [b"a", b"a", b"b", b"b"]


async def test_a_handler_may_end_before_its_requests(wire: Wire) -> None:
    class Sated(EchoServicer):
        async def Both(self, request_iterator: AsyncIterator[Echo], context: Context) -> AsyncIterator[Echo]:
            yield await anext(request_iterator)

    await wire.serve(Sated())
    call = wire.stub().Both(timeout=DEADLINE_S)
    await call.write(Echo(value=b"a"))
    assert [echo.value async for echo in call] == [b"a"]
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(Echo(value=b"b"))


async def test_metadata_both_ways(wire: Wire) -> None:
    seen: list[str | None] = []

    class Noting(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            seen.append(value_of(received(context), "greenroom-instance"))
            await context.send_initial_metadata((("early", "1"),))
            context.set_trailing_metadata((("late", "2"),))
            return request

    await wire.serve(Noting())
    call = wire.stub().Unary(Echo(), metadata=(("greenroom-instance", "g-1"),), timeout=DEADLINE_S)
    await call
    assert seen == ["g-1"]
    assert value_of(await call.initial_metadata(), "early") == "1"
    assert value_of(await call.trailing_metadata(), "late") == "2"


async def test_metadata_keys_are_in_lower_case(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    with pytest.raises(grpc.aio.InternalError):
        await wire.stub().Unary(Echo(), metadata=(("Upper", "1"),), timeout=DEADLINE_S)


async def test_the_request_id_goes_along(wire: Wire) -> None:
    seen: list[str] = []

    class Noting(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            seen.append(request_id.get())
            return request

    await wire.serve(Noting())
    token = request_id.set("req-1")
    try:
        await wire.stub().Unary(Echo(), metadata=outgoing(), timeout=DEADLINE_S)
        # Nothing else of the caller's context does.
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    finally:
        request_id.reset(token)
    assert seen == ["req-1", ""]


async def test_the_end_is_told_to_both_sides(wire: Wire) -> None:
    told: list[str] = []

    class Noting(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            context.add_done_callback(lambda ctx: told.append("handler"))  # type: ignore[arg-type]  # of grpc's types
            return request

    await wire.serve(Noting())
    call = wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    call.add_done_callback(lambda call: told.append("caller"))
    await call
    await until(lambda: sorted(told) == ["caller", "handler"], "both have been told")


async def test_many_streams_at_once(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    stub = wire.stub()

    async def one(number: int) -> bool:
        values = [f"{number}/{index}".encode() for index in range(60)]
        call = stub.Both(_given(*values), timeout=6 * DEADLINE_S)
        return [echo.value async for echo in call] == values

    assert all(await asyncio.gather(*(one(number) for number in range(50))))
    await until(lambda: wire.calls == 0, "all calls have ended")


async def test_a_large_message(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    large = Echo(value=bytes(20 * 1024 * 1024))
    assert len((await wire.stub().Unary(large, timeout=6 * DEADLINE_S)).value) == len(large.value)


async def test_a_call_to_an_address_without_a_server_fails(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in wire.stub().Both(_given(b"a"), timeout=DEADLINE_S):
            pass
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_may_wait_for_a_server_that_comes_later(wire: Wire) -> None:
    stub = wire.stub()
    early = stub.Unary(Echo(value=b"early"), wait_for_ready=True, timeout=3 * DEADLINE_S)
    given_up = stub.Unary(Echo(), wait_for_ready=True, timeout=0.05)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await given_up
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wire.serve(EchoServicer())
    assert (await early).value == b"early"


async def test_a_method_that_is_not_there(wire: Wire) -> None:
    await wire.serve(EchoServicer())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Missing(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
