"""Spans: off they cost nothing; on they reach a collector, and no call waits for that."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.fabric import telemetry
from greenroom.fabric.rpc import Context, LocalDialer, call
from greenroom.fabric.telemetry import TelemetryConfig
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer, EchoStub
from tests.contract.rpc.wires import DEADLINE_S
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.otlp_collector import Collector, collecting_over_grpc, collecting_over_http

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def over_grpc() -> Iterator[tuple[Collector, str]]:
    with collecting_over_grpc() as collector:
        yield collector, collector.endpoint


@pytest.fixture
def over_http() -> Iterator[tuple[Collector, str]]:
    with collecting_over_http() as collector:
        yield collector, collector.endpoint


@pytest.fixture
async def off_afterwards() -> AsyncIterator[None]:
    yield
    await telemetry.stop(0.1)


@pytest.mark.usefixtures("off_afterwards")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_spans_reach_a_collector(protocol: str, request: pytest.FixtureRequest) -> None:
    collector, endpoint = request.getfixturevalue("over_grpc" if protocol == "grpc" else "over_http")
    telemetry.start(TelemetryConfig(endpoint=endpoint, protocol=protocol, service="greenroom-test", instance="i-1"))
    parent = telemetry.extract([("traceparent", PARENT.encode()), ("other", b"\xff")])
    with telemetry.span("outer", parent=parent, kind="consumer", request_id="req-1") as outer:
        outer.set("tokens", 3)
        outer.event("first token")
        assert telemetry.trace_id() == TRACE
        with telemetry.span("inner"):
            pass
    with pytest.raises(ValueError, match="no"), telemetry.span("broken", parent=parent):
        raise ValueError("no")
    assert telemetry.trace_id() == ""
    await telemetry.stop(DEADLINE_S)
    spans = collector.spans
    assert set(spans) == {"outer", "inner", "broken"}
    assert spans["outer"].trace_id.hex() == TRACE
    assert spans["outer"].parent_span_id.hex() == "b7ad6b7169203331"
    assert spans["outer"].kind == Span.SPAN_KIND_CONSUMER
    assert spans["inner"].parent_span_id == spans["outer"].span_id
    assert {attribute.key for attribute in spans["outer"].attributes} == {"request_id", "tokens"}
    assert spans["outer"].events[0].name == "first token"
    assert spans["broken"].status.code == 2
    assert collector.resource["service.name"] == "greenroom-test"
    assert collector.resource["service.instance.id"] == "i-1"


@pytest.mark.usefixtures("off_afterwards")
async def test_a_trace_goes_through_records_and_calls(over_grpc: tuple[Collector, str]) -> None:
    collector, endpoint = over_grpc
    seen: list[str] = []

    class Traced(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            seen.append(telemetry.trace_id())
            return request

    telemetry.start(TelemetryConfig(endpoint=endpoint))
    with telemetry.span("accept"):
        headers = telemetry.inject([("content", b"msgpack")])
        trace_id = telemetry.trace_id()
    assert headers[0] == ("content", b"msgpack")
    async with LocalDialer() as dialer:
        server = dialer.serve("worker", [Traced()])
        with telemetry.span("place", parent=telemetry.extract(headers), kind="consumer"):
            await call(dialer.stub(EchoStub, "worker").Unary, Echo(), timeout_s=DEADLINE_S)
        await call(dialer.stub(EchoStub, "worker").Unary, Echo(), timeout_s=DEADLINE_S)
        await server.stop(1.0)
    assert seen == [trace_id, ""], "what is not part of a trace begins none"
    await telemetry.stop(DEADLINE_S)
    spans = collector.spans
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert spans["place"].parent_span_id == spans["accept"].span_id
    assert spans["/tests.Echo/Unary"].parent_span_id == spans["place"].span_id


@pytest.mark.usefixtures("off_afterwards")
async def test_a_span_that_was_begun_ends_when_it_is_told(over_grpc: tuple[Collector, str]) -> None:
    collector, endpoint = over_grpc
    telemetry.start(TelemetryConfig(endpoint=endpoint))
    begun = telemetry.begin("request")
    assert telemetry.trace_id() == ""
    with begun.active():
        assert telemetry.trace_id()
        with telemetry.span("child"):
            pass
    begun.fail("shed")
    begun.end()
    await telemetry.stop(DEADLINE_S)
    assert collector.spans["child"].parent_span_id == collector.spans["request"].span_id
    assert collector.spans["request"].status.message == "shed"


@pytest.mark.usefixtures("off_afterwards")
@pytest.mark.parametrize("headers", [[], [("traceparent", b"nonsense")], [("traceparent", b"\xff" * 10_000)]])
async def test_what_is_no_trace_is_none(headers: list[tuple[str, bytes]], over_grpc: tuple[Collector, str]) -> None:
    telemetry.start(TelemetryConfig(endpoint=over_grpc[1]))
    assert telemetry.extract(headers) is None


def make_spans(count: int) -> float:
    """The seconds of this thread's own work that they took: others on the machine do not count."""
    began = time.thread_time()
    for _ in range(count):
        with telemetry.span("lost"):
            pass
    return time.thread_time() - began


@pytest.mark.usefixtures("off_afterwards")
async def test_a_collector_that_is_away_costs_little_and_is_told_of_seldom(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        telemetry.start(TelemetryConfig(endpoint="http://127.0.0.1:1", queue=100, send_every_s=0.01, timeout_s=0.5))
        assert make_spans(5_000) < 5.0
        await telemetry.stop(0.5)
    assert not telemetry.enabled()
    # It says so, but not thousands of times.
    assert 0 < len(caplog.records) < 20


@pytest.mark.usefixtures("off_afterwards")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_does_not_answer_delays_nothing(protocol: str, request: pytest.FixtureRequest) -> None:
    """The exporter would wait for ten minutes. If the stop waited as long, it would not be through in one."""
    collector, endpoint = request.getfixturevalue("over_grpc" if protocol == "grpc" else "over_http")
    collector.answers.clear()
    config = TelemetryConfig(endpoint=endpoint, protocol=protocol, queue=100, send_every_s=0.01, timeout_s=600.0)
    telemetry.start(config)
    try:
        make_spans(1)
        await until(lambda: collector.requests, "the first is sent")
        async with asyncio.timeout(60.0):
            await asyncio.to_thread(make_spans, 5_000)
            stopping = asyncio.create_task(telemetry.stop(0.5))
            await asyncio.sleep(0)
            assert not stopping.done(), "what waits is sent, within half a second"
            await stopping
        assert len(collector.requests) == 1, "it has not answered the first yet"
    finally:
        collector.answers.set()
    assert not telemetry.enabled()
    await until(lambda: "telemetry's end" not in {thread.name for thread in threading.enumerate()}, "all is sent")


def test_off_it_does_nothing_quickly() -> None:
    assert not telemetry.enabled()
    headers = [("a", b"1")]
    assert telemetry.inject(headers) is headers
    assert telemetry.extract([("traceparent", PARENT.encode())]) is None
    with telemetry.span("a", request_id="req-1") as span, span.active():
        span.set("b", 1)
        span.event("c")
        span.fail("d")
        assert telemetry.trace_id() == ""
    span.end()

    def seconds_a_span() -> float:
        began = time.perf_counter()
        for _ in range(10_000):
            with telemetry.span("a", request_id="req-1"):
                pass
        return (time.perf_counter() - began) / 10_000

    # A microsecond is the aim; ten leave room for a machine that does other things.
    assert min(seconds_a_span() for _ in range(5)) < 10e-6


def test_off_it_imports_nothing() -> None:
    code = (
        "import sys, greenroom.fabric.rpc, greenroom.fabric.lifecycle;"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("off_afterwards")
async def test_it_is_started_once(over_grpc: tuple[Collector, str]) -> None:
    telemetry.start(TelemetryConfig(endpoint=over_grpc[1]))
    with pytest.raises(RuntimeError, match="already"):
        telemetry.start(TelemetryConfig(endpoint=over_grpc[1]))
    await telemetry.stop(0.5)
    await asyncio.sleep(0)
    telemetry.start(TelemetryConfig(endpoint=over_grpc[1]))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"endpoint": "localhost:4317"}, "otlp_endpoint"),
        ({"endpoint": "ftp://localhost"}, "otlp_endpoint"),
        ({"endpoint": "http://localhost:4317", "protocol": "http/json"}, "otlp_protocol"),
        ({"endpoint": "http://localhost:4317", "queue": 0}, "queue"),
        ({"endpoint": "http://localhost:4317", "timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_telemetry_can_not_be(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        TelemetryConfig(**given)


def test_where_http_posts_them() -> None:
    for endpoint in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert TelemetryConfig(endpoint=endpoint).traces_url == "http://c:4318/v1/traces"


def test_the_protocol_is_read_from_the_environment_where_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert TelemetryConfig(endpoint="http://c:4318").protocol == "http/protobuf"
    assert TelemetryConfig(endpoint="http://c:4317", protocol="grpc").protocol == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    assert TelemetryConfig(endpoint="http://c:4317").protocol == "grpc"
