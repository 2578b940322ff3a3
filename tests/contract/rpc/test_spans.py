"""A server's span says what its caller was told, and is a failure only where the server is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc
import pytest

from greenroom.core.errors import InvalidRequest, Saturated
from greenroom.fabric.rpc import Context, Refused
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer
from tests.contract.rpc.wires import DEADLINE_S, Wire
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.otlp_collector import Collector, collecting_over_grpc, text_attributes, traced

TRACEPARENT = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
UNSET, ERROR = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
Code = grpc.StatusCode
End = Callable[[Context], Awaitable[None]]


class Ends(EchoServicer):
    def __init__(self, end: End) -> None:
        self._end = end
        self.began = False

    async def Unary(self, request: Echo, context: Context) -> Echo:
        self.began = True
        await self._end(context)
        return request

    async def Down(self, request: Echo, context: Context) -> AsyncIterator[Echo]:
        yield request
        await self._end(context)


def raising(error: Exception) -> End:
    async def end(context: Context) -> None:
        raise error

    return end


def aborting(code: grpc.StatusCode) -> End:
    async def end(context: Context) -> None:
        await context.abort(code, "as it wants")

    return end


async def setting(context: Context) -> None:
    context.set_code(Code.UNIMPLEMENTED)


async def well(context: Context) -> None:
    pass


async def never(context: Context) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_over_grpc() as made:
        yield made


def seen(collector: Collector, method: str = "Unary") -> tuple[str, str, Status]:
    """The code and the word of the one span of ``method``, and its status."""
    [span] = [span for span in collector.all if span.name == f"/tests.Echo/{method}"]
    assert span.kind == Span.SPAN_KIND_SERVER
    attributes = text_attributes(span)
    code = attributes["rpc.response.status_code"]
    assert attributes.get("error.type") == (code if span.status.code == ERROR else None)
    return code, attributes.get("code", ""), span.status


@pytest.mark.parametrize(
    ("end", "code", "word", "status"),
    [
        (well, "OK", "", UNSET),
        (raising(InvalidRequest("no")), "INVALID_ARGUMENT", "invalid_value", UNSET),
        (raising(Saturated("no room", retry_after_s=1.0)), "RESOURCE_EXHAUSTED", "saturated", UNSET),
        (raising(Refused(Code.UNAVAILABLE, "later", word="not_ready")), "UNAVAILABLE", "not_ready", ERROR),
        (raising(ZeroDivisionError("a defect")), "INTERNAL", "internal_error", ERROR),
        (aborting(Code.NOT_FOUND), "NOT_FOUND", "", UNSET),
        (aborting(Code.DATA_LOSS), "DATA_LOSS", "", ERROR),
        (setting, "UNIMPLEMENTED", "", ERROR),
    ],
)
async def test_how_a_handler_ends_its_call(
    wire: Wire, collector: Collector, end: End, code: str, word: str, status: int
) -> None:
    await wire.serve(Ends(end))
    async with traced(collector):
        for call in (wire.stub().Unary(Echo(), timeout=DEADLINE_S, metadata=TRACEPARENT), _all(wire)):
            assert await _told(call) == code
        await until(lambda: wire.calls == 0, "the calls are over")
    for method in ("Unary", "Down"):
        *said, told = seen(collector, method)
        assert said == [code, word]
        assert (told.code, told.message) == (status, word if status == ERROR else "")


async def _told(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _all(wire: Wire) -> None:
    async for _ in wire.stub().Down(Echo(), timeout=DEADLINE_S, metadata=TRACEPARENT):
        pass


async def test_a_caller_that_leaves_is_no_failure(wire: Wire, collector: Collector) -> None:
    servicer = Ends(never)
    await wire.serve(servicer)
    async with traced(collector):
        call = wire.stub().Unary(Echo(), metadata=TRACEPARENT)
        waiting = asyncio.ensure_future(call)
        await until(lambda: servicer.began, "the call is there")
        call.cancel()
        await asyncio.wait([waiting], timeout=DEADLINE_S)
        await until(lambda: wire.calls == 0, "the call is over")
    code, _, status = seen(collector)
    assert (code, status.code) == ("CANCELLED", UNSET)


async def test_a_server_that_stops_is_at_fault(wire: Wire, collector: Collector) -> None:
    servicer = Ends(never)
    await wire.serve(servicer)
    async with traced(collector):
        waiting = asyncio.ensure_future(wire.stub().Unary(Echo(), metadata=TRACEPARENT))
        await until(lambda: servicer.began, "the call is there")
        await wire.stop(0.0)
        await asyncio.wait([waiting], timeout=DEADLINE_S)
        assert isinstance(waiting.exception(), grpc.aio.AioRpcError)
    code, word, status = seen(collector)
    assert (code, word, status.code) == ("UNAVAILABLE", "stopping", ERROR)


async def test_what_is_of_no_trace_has_no_span(wire: Wire, collector: Collector) -> None:
    await wire.serve(Ends(well))
    async with traced(collector):
        await wire.stub().Unary(Echo(), timeout=DEADLINE_S)
    assert collector.all == []
