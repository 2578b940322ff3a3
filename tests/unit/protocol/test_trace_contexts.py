"""Which trace a request belongs to is known for as long as the scheduler has the request, and not longer."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.messages import Cancel, Lost, Outcome, encode
from greenroom.fabric import telemetry
from greenroom.fabric.log import Headers, Record
from greenroom.fabric.telemetry import TelemetryConfig
from greenroom.fabric.topics import JOURNAL
from greenroom.scheduler.trace_contexts import TraceContexts
from tests.contract.rpc.wires import Local
from tests.unit.protocol.one_scheduler import HEADERS, OneAtATime, scheduling, task
from tests.unit.protocol.pool_bench import Bench
from tests.waiting import until

TRACES = ("0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c")


def record(*traces: str) -> Record:
    headers: Headers = [("traceparent", f"00-{trace}-b7ad6b7169203331-01".encode()) for trace in traces]
    return Record("tasks", 0, 0, 0, None, b"", headers)


@pytest.fixture
async def on() -> AsyncIterator[None]:
    pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")
    telemetry.start(TelemetryConfig(endpoint="http://127.0.0.1:1", send_every_s=60.0, timeout_s=0.1))
    yield
    await telemetry.stop(0.1)


def trace_of(trace_contexts: TraceContexts, request_id: str) -> str:
    with trace_contexts.span("place", request_id):
        return telemetry.trace_id()


def test_while_telemetry_is_off_nothing_is_kept() -> None:
    bench = Bench()
    trace_contexts = TraceContexts(bench.pool)
    bench.task("r")
    trace_contexts.came("r", record(TRACES[0]))
    assert not len(trace_contexts)
    assert trace_of(trace_contexts, "r") == ""


@pytest.mark.usefixtures("on")
def test_the_first_record_of_a_request_that_has_a_span_counts() -> None:
    bench = Bench()
    trace_contexts = TraceContexts(bench.pool)
    bench.task("r")
    trace_contexts.came("r", record())
    assert trace_of(trace_contexts, "r") == "", "what is of no trace begins none"
    for trace in TRACES:
        trace_contexts.came("r", record(trace))
    assert trace_of(trace_contexts, "r") == TRACES[0]


@pytest.mark.usefixtures("on")
def test_it_is_forgotten_when_the_pool_forgets_the_request() -> None:
    bench = Bench()
    trace_contexts = TraceContexts(bench.pool)
    bench.task("r")
    trace_contexts.came("r", record(TRACES[0]))
    trace_contexts.ended("r")
    assert len(trace_contexts) == 1, "an outcome that does not count ends nothing"
    bench.record(Cancel(request_id="r", pool=0, deadline_ms=2**40))
    [outcome] = bench.pending
    assert isinstance(outcome, Outcome)
    assert outcome.reason is FinishReason.CANCELLED
    bench.land()
    trace_contexts.ended("r")
    assert not len(trace_contexts)
    bench.task("r")  # a copy of one that has ended
    trace_contexts.came("r", record(TRACES[0]))
    assert not len(trace_contexts)


@pytest.mark.usefixtures("on")
async def test_the_dead_letter_of_one_that_is_given_up_is_of_its_trace() -> None:
    wire = Local()
    await wire.serve(OneAtATime())  # type: ignore[arg-type]  # any servicer
    async with scheduling(wire, io.StringIO()) as scheduler:
        pool = scheduler.runner.pool
        pool.config = replace(pool.config, max_losses=1, alone_after=1)
        lost = Lost(epoch=pool.epoch, worker="w", attempts=(("r", Attempt(pool.epoch, 0)),))
        position = await scheduler.log.append(JOURNAL, encode(lost), partition=0)
        await until(lambda: pool.fold.next_offset > position.offset, "the loss was read")
        await scheduler.feed(task("r"), HEADERS)
        await scheduler.until_all_ended()
        [carried] = await scheduler.letters_carried()
    assert dict(carried)["traceparent"].split(b"-")[1] == TRACES[0].encode()
    assert dict(carried) != dict(HEADERS), "it is of the span that wrote it"
    await wire.stop(0.0)
    await wire.dialer.close()
