"""Small parts of a worker's service: settings, faults, results, counters."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import Finished, FinishReason, SamplingParams, Slo, Token, TokenLogprobs
from greenroom.core.logprobs import unpack_tokens
from greenroom.core.messages import Request, Task
from greenroom.fabric.wire import logprobs_of
from greenroom.v1 import common_pb2, worker_pb2
from greenroom.worker.faults import Fault, fault_of
from greenroom.worker.process import share_interpreter
from greenroom.worker.runs.results import CLOSINGS, REFUSALS, reported, request_of
from greenroom.worker.runs.run_table import Closing, Refusal
from greenroom.worker.service_config import ArtifactConfig, ForecastConfig, ServiceConfig, StreamConfig, TraceConfig
from greenroom.worker.service_counters import ServiceCollector, ServiceCounters


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: ServiceConfig(instance=""), "instance"),
        (lambda: ServiceConfig(instance="w", pool=-1), "pool"),
        (lambda: ServiceConfig(instance="w", max_running=0), "max_running"),
        (lambda: ServiceConfig(instance="w", max_queued=-1), "max_queued"),
        (lambda: ServiceConfig(instance="w", grace_ms=0), "grace_ms"),
        (lambda: StreamConfig(slow_gateway_ms=float("nan")), "slow_gateway_ms"),
        (lambda: StreamConfig(most_pending=0), "most_pending"),
        (lambda: TraceConfig(rows=0), "rows"),
        (lambda: TraceConfig(timeout_ms=10**9), "timeout_ms"),
        (lambda: ForecastConfig(every=-1), "every"),
        (lambda: ForecastConfig(timeout_ms=-1), "timeout_ms"),
        (lambda: ArtifactConfig(every_ms=-1), "every_ms"),
        (lambda: ArtifactConfig(retry_ms=0), "retry_ms"),
        (lambda: ArtifactConfig(max_bytes=0), "max_bytes"),
    ],
)
def test_a_bad_value_is_named(made: Any, field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: ") as caught:
        made()
    assert caught.value.field == field


def test_faults_are_asked_for_by_name() -> None:
    assert fault_of(None) is None
    assert fault_of("tasktype:after-append:3") is None
    assert fault_of("worker:after-token:3") == Fault(after_token=3)
    assert fault_of("worker:poison:a:b") == Fault(poison="a:b")
    assert fault_of("worker:mover:0") == Fault(mover=0)
    assert fault_of("worker:device:6") == Fault(device=6)
    for wrong in (
        "worker:", "worker:after-token:0", "worker:after-token:x", "worker:poison:", "worker:mover:-1", "worker:sulk:1"
    ):  # fmt: skip
        with pytest.raises(InvalidConfig, match="worker:poison:TEXT, worker:mover:N or worker:device:N"):
            fault_of(wrong)


def test_a_fault_kills_at_its_moment_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    fault = Fault(after_token=5)
    fault.tokens(4)
    fault.begins("anything")
    assert killed == []
    fault.tokens(3)
    assert killed == [signal.SIGKILL]
    fault = Fault(poison="hemlock")
    fault.begins("a cup of tea")
    fault.tokens(1000)
    fault.begins("a cup of hemlock")
    assert killed == [signal.SIGKILL] * 2


def test_every_refusal_and_every_closing_has_its_word() -> None:
    assert set(REFUSALS) == set(Refusal)
    assert set(CLOSINGS) == set(Closing)
    assert all(worker_pb2.RunRefused.Why.Name(why) == f"WHY_{refusal.name}" for refusal, why in REFUSALS.items())
    assert all(worker_pb2.RunClosed.Why.Name(why) == f"WHY_{closing.name}" for closing, why in CLOSINGS.items())


def test_a_result_carries_all_that_was_generated() -> None:
    tokens = [Token(i, 10 + i, TokenLogprobs(-0.5 * i, ((10 + i, -0.5 * i), (3, -2.0)))) for i in range(3)]
    response = reported(Finished(FinishReason.STOP, 7, 3, approximated=0.25), tokens)
    result = response.result
    assert (result.reason, result.prompt_tokens, result.message) == (common_pb2.END_REASON_STOP, 7, "")
    assert result.approximated == 0.25
    assert unpack_tokens(list(result.token_ids), logprobs_of(result)) == tokens
    plain = reported(Finished(FinishReason.FAILED, 7, 0, "why " * 1000), []).result
    assert plain.reason == common_pb2.END_REASON_FAILED
    assert len(plain.message) == 2000
    assert logprobs_of(plain) is None
    assert plain.approximated == 0.0


def test_every_count_is_shown_with_its_help() -> None:
    registry = CollectorRegistry()
    counters = ServiceCounters(tokens=12, traces_dropped=3)
    registry.register(ServiceCollector(counters, lambda: [("runs_here", "Runs here.", 2.0)]))
    shown = generate_latest(registry).decode()
    assert "greenroom_worker_tokens_total 12.0" in shown
    assert "greenroom_worker_traces_dropped_total 3.0" in shown
    assert "greenroom_worker_runs_here 2.0" in shown
    assert shown.count("# HELP") == len(ServiceCounters.__slots__) + 1


def test_forecasts_are_counted_by_what_they_were_made_from_and_never_by_too_many_names() -> None:
    registry = CollectorRegistry()
    counters = ServiceCounters()
    registry.register(ServiceCollector(counters))
    for source in ("task type", "learned emoe-a", "task type", *(f"strange {number}" for number in range(100))):
        counters.forecast(source)
    assert counters.forecasts == 103
    assert registry.get_sample_value("greenroom_worker_forecasts_by_source_total", {"source": "task type"}) == 2
    assert registry.get_sample_value("greenroom_worker_forecasts_by_source_total", {"source": "other"}) == 86
    assert len(counters.forecasts_by_source) == 17


def test_the_engine_is_told_what_is_left_of_the_first_tokens_slo() -> None:
    def slo(now_ms: float | None, **objectives: float) -> Slo:
        request = Request(
            request_id="r", pool=0, model="m", prompt_ids=(1,), sampling=SamplingParams(), accepted_ms=1000,
            deadline_ms=9000, slo=Slo(**objectives),
        )  # fmt: skip
        return request_of(Task(request=request, task_type="chat"), now_ms=now_ms).slo

    assert slo(1400.0, ttft_ms=500.0, e2e_ms=900.0) == Slo(ttft_ms=100.0, e2e_ms=900.0)
    assert slo(900.0, ttft_ms=500.0).ttft_ms == 500.0, "the other machine's clock is behind"
    assert slo(5000.0, ttft_ms=500.0).ttft_ms == 1.0
    assert slo(1400.0) == Slo()


def test_a_worker_s_threads_pass_the_interpreter_on_sooner_than_python_s_own() -> None:
    before = sys.getswitchinterval()
    try:
        share_interpreter()
        assert 0.0001 <= sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)
