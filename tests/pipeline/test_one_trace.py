"""A request is one trace, from the client's own span to the worker and the outcome, over both front doors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from greenroom.core.generation import GenerationRequest
from greenroom.embedded import EmbeddedConfig
from greenroom.fabric.log import Headers, MemoryLog, Position
from greenroom.gateway.service import GatewayService
from greenroom.text import TextProcessor
from greenroom.v1 import inference_pb2, inference_pb2_grpc
from tests.pipeline.embedded import complete, embedded
from tests.pipeline.worker.scripted import CARD, ScriptedEngine
from tests.waiting import DEADLINE_S, until

pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.otlp_collector import Collector, collecting_over_grpc, text_attributes, traced

CLIENT_SPAN = "b7ad6b7169203331"
CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = (("traceparent", f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"),)
Appended = list[tuple[str, Headers]]
RUN = "/greenroom.v1.Worker/Run"


class Prompt(ScriptedEngine):
    """Says all that it is asked for at once; where it is ``silent`` nothing."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__()
        self._silent = silent

    def begin(self, number: int, request: GenerationRequest) -> None:
        super().begin(number, request)
        if not self._silent:
            asyncio.get_running_loop().call_soon(self.step, request.sampling.max_tokens or 1)


class Front:
    """One of the two front doors. ``span``: what its own span is called."""

    span: str

    async def ask(self, gateway: GatewayService, *metadata: tuple[str, str]) -> None:
        """One request, answered."""
        raise NotImplementedError


class Http(Front):
    span = "POST /v1/completions"

    async def ask(self, gateway: GatewayService, *metadata: tuple[str, str]) -> None:
        status, said = await complete(gateway, {"model": CARD.name, "prompt": [5, 6], "max_tokens": 2}, dict(metadata))
        assert status == 200, said


class Grpc(Front):
    span = "/greenroom.v1.Inference/Generate"

    async def ask(self, gateway: GatewayService, *metadata: tuple[str, str]) -> None:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6]), max_tokens=2)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway._gateway.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await stub.Generate(request, timeout=DEADLINE_S, metadata=metadata)


FRONTS = {"http": Http, "grpc": Grpc}


@pytest.fixture(params=list(FRONTS))
def front(request: pytest.FixtureRequest) -> Front:
    made: Front = FRONTS[request.param]()
    return made


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_over_grpc() as made:
        yield made


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> Appended:
    """Topics and headers of all that is appended to the log."""
    found: Appended = []
    append = MemoryLog.append

    async def noted(log: MemoryLog, topic: str, value: bytes | None, **how: Any) -> Position:
        found.append((topic, how.get("headers", ())))
        return await append(log, topic, value, **how)

    monkeypatch.setattr(MemoryLog, "append", noted)
    return found


@asynccontextmanager
async def pipeline(text: TextProcessor, engine: Prompt | None = None) -> AsyncIterator[GatewayService]:
    """All services in this process, ready."""
    async with embedded(EmbeddedConfig(), engine or Prompt(), CARD, text) as (gateway, _):
        yield gateway


def of_trace(collector: Collector, trace_id: str) -> dict[str, Span]:
    """The trace's spans by name; each came once."""
    spans = [span for span in collector.all if span.trace_id.hex() == trace_id]
    assert set(Counter(span.name for span in spans).values()) <= {1}
    return {span.name: span for span in spans}


def check_hops(spans: dict[str, Span], front: Front) -> None:
    """Every hop is there, below the one that led to it, and says which request it is about."""
    assert set(spans) == {front.span, "tasktype", "place", RUN, "outcome"}
    above = {name: span.parent_span_id for name, span in spans.items()}
    assert above["tasktype"] == spans[front.span].span_id
    assert above["place"] == above["outcome"] == spans["tasktype"].span_id
    assert above[RUN] == spans["place"].span_id
    asked = {text_attributes(spans[name])["request_id"] for name in ("tasktype", "place", "outcome")}
    assert len(asked) == 1
    assert text_attributes(spans["place"])["end"] == "result"
    assert text_attributes(spans["outcome"])["reason"] == "length"


def span_of(headers: Headers) -> list[str]:
    """Trace and span that the record carries."""
    return dict(headers)["traceparent"].decode().split("-")[1:3]


async def test_the_clients_own_span_is_above_all_hops_and_records_carry_it_on(
    front: Front, collector: Collector, text: TextProcessor, appended: Appended
) -> None:
    async with traced(collector), pipeline(text) as gateway:
        await front.ask(gateway, *TRACEPARENT)
    spans = of_trace(collector, CLIENT_TRACE)
    check_hops(spans, front)
    assert spans[front.span].parent_span_id.hex() == CLIENT_SPAN
    assert {topic: span_of(headers) for topic, headers in appended if headers} == {
        "requests": [CLIENT_TRACE, spans[front.span].span_id.hex()],
        "tasks": [CLIENT_TRACE, spans["tasktype"].span_id.hex()],
        "journal": [CLIENT_TRACE, spans["outcome"].span_id.hex()],
    }


async def test_without_one_each_request_is_a_trace_of_its_own(
    front: Front, collector: Collector, text: TextProcessor
) -> None:
    async with traced(collector), pipeline(text) as gateway:
        await asyncio.gather(*(front.ask(gateway) for _ in range(3)))
    roots = [span for span in collector.all if not span.parent_span_id]
    assert [span.name for span in roots] == [front.span] * 3
    for root in roots:
        check_hops(of_trace(collector, root.trace_id.hex()), front)


async def test_the_cancel_of_a_client_that_left_is_of_its_trace(
    front: Front, collector: Collector, text: TextProcessor, appended: Appended
) -> None:
    engine = Prompt(silent=True)
    async with traced(collector), pipeline(text, engine) as gateway:
        asking = asyncio.create_task(front.ask(gateway, *TRACEPARENT))
        await until(lambda: engine.begun)
        asking.cancel()
        await until(lambda: [topic for topic, headers in appended if headers].count("tasks") == 2)
        await asyncio.wait([asking], timeout=DEADLINE_S)
    carried = [(topic, span_of(headers)[0]) for topic, headers in appended if headers]
    assert {trace for _, trace in carried} == {CLIENT_TRACE}
    assert [topic for topic, _ in carried].count("requests") == 2


async def test_off_no_span_goes_along(front: Front, text: TextProcessor, appended: Appended) -> None:
    async with pipeline(text) as gateway:
        await front.ask(gateway, *TRACEPARENT)
    assert {"requests", "tasks", "journal"} <= {topic for topic, _ in appended}
    assert not [headers for _, headers in appended if headers]
