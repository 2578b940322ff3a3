"""What a caller is told when a handler fails, and what it is not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from greenroom.core.errors import BudgetTooSmall, Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.fabric.rpc import Context, Refused, retry_after_of, value_of, word_of
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer
from tests.contract.rpc.wires import DEADLINE_S, Wire, drained


class Fails(EchoServicer):
    """Every handler raises what it was given; those that stream, after the first response."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def Unary(self, request: Echo, context: Context) -> Echo:
        raise self._error

    async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
        yield request
        raise self._error

    async def Up(self, request_iterator: AsyncIterator[Echo], context: Context) -> Echo:
        async for _ in request_iterator:
            pass
        raise self._error

    async def Both(self, request_iterator: AsyncIterator[Echo], context: Context) -> AsyncIterator[Echo]:
        async for request in request_iterator:
            yield request
        raise self._error


async def _three() -> AsyncIterator[Echo]:
    for _ in range(3):
        yield Echo(value=b"a")


async def _failures(wire: Wire) -> list[grpc.aio.AioRpcError]:
    """Of every kind of call."""
    stub = wire.stub()
    failures = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Unary(Echo(), timeout=DEADLINE_S)
    failures.append(raised.value)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Up(_three(), timeout=DEADLINE_S)
    failures.append(raised.value)
    for call, expected in ((stub.Down(Echo(), timeout=DEADLINE_S), 1), (stub.Both(_three(), timeout=DEADLINE_S), 3)):
        got, failure = await drained(call)
        assert len(got) == expected, "what was sent before the failure comes before it"
        failures.append(failure)
    return failures


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (InvalidRequest("top_p must be above 0", param="top_p"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
        (InvalidRequest("too long", code="context_length"), grpc.StatusCode.INVALID_ARGUMENT, "context_length"),
        (Conflict("another body"), grpc.StatusCode.ALREADY_EXISTS, "conflict"),
        (Saturated("no room", retry_after_s=2.2), grpc.StatusCode.RESOURCE_EXHAUSTED, "saturated"),
        (BudgetTooSmall("give it more"), grpc.StatusCode.INTERNAL, "failed"),
        (Refused(grpc.StatusCode.NOT_FOUND, "no such model", word="model_not_found"), grpc.StatusCode.NOT_FOUND,
         "model_not_found"),
    ],
)  # fmt: skip
async def test_our_own_errors_are_told_as_they_are(
    wire: Wire, error: GreenroomError, code: grpc.StatusCode, word: str
) -> None:
    await wire.serve(Fails(error))
    for failure in await _failures(wire):
        assert failure.code() is code
        assert failure.details() == str(error)
        assert word_of(failure) == word
        assert retry_after_of(failure) == (3.0 if isinstance(error, Saturated) else None)


async def test_of_anything_else_only_the_log_tells(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    await wire.serve(Fails(RuntimeError("the secret is 42")))
    with caplog.at_level(logging.ERROR):
        for failure in await _failures(wire):
            assert failure.code() is grpc.StatusCode.INTERNAL
            assert "42" not in str(failure)
            assert word_of(failure) == "internal_error"
    told = [record for record in caplog.records if record.exc_info and "42" in str(record.exc_info[1])]
    assert len(told) == 4


async def test_the_log_names_the_request(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    await wire.serve(Fails(RuntimeError("broken")))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError):
        await wire.stub().Unary(Echo(), metadata=(("x-request-id", "req-7"),), timeout=DEADLINE_S)
    assert any("req-7" in record.getMessage() for record in caplog.records)


async def test_a_long_text_is_cut(wire: Wire) -> None:
    await wire.serve(Fails(InvalidRequest("x" * 100_000)))
    for failure in await _failures(wire):
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert 0 < len(failure.details() or "") <= 1024


async def test_an_abort_with_what_belongs_to_it(wire: Wire) -> None:
    class Aborts(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not I", (("who", "g-2"),))
            raise AssertionError("an abort does not return")

        async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
            yield request
            context.set_trailing_metadata((("who", "g-2"),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "not I")

    await wire.serve(Aborts())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    failures = [raised.value]
    _, failure = await drained(wire.stub().Down(Echo(), timeout=DEADLINE_S))
    failures.append(failure)
    for failure in failures:
        assert failure.code() is grpc.StatusCode.NOT_FOUND
        assert failure.details() == "not I"
        assert value_of(failure.trailing_metadata(), "who") == "g-2"


async def test_a_code_that_was_set(wire: Wire) -> None:
    class Sets(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            context.set_code(grpc.StatusCode.OUT_OF_RANGE)
            context.set_details("too far")
            return request

    await wire.serve(Sets())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert raised.value.details() == "too far"


async def test_a_failure_on_the_way_out_of_an_abort_changes_nothing(wire: Wire) -> None:
    class Clumsy(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            try:
                await context.abort(grpc.StatusCode.NOT_FOUND, "not I")
            finally:
                raise RuntimeError("the secret is 42")

    await wire.serve(Clumsy())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "not I"
