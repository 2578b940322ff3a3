"""Latency estimates against what it came to: from a placement to the metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from greenroom.core.generation import FinishReason, SamplingParams, Slo
from greenroom.core.messages import Request, Task
from greenroom.policies.base.answer_lengths import ENOUGH
from greenroom.policies.emoe.scheduling import EmoePlacement
from greenroom.policies.placement.placement_policy import Costs
from greenroom.scheduler.accuracy import RATIOS, Accuracy
from greenroom.scheduler.metrics import SchedulerCollector
from greenroom.scheduler.pool_workers import Capacity, WorkerState
from greenroom.scheduler.request_entries import RunResult
from greenroom.scheduler.worker_calls import _costs
from greenroom.v1 import worker_pb2
from tests.unit.protocol.pool_bench import CONFIG, DONE, Bench


def run_one(bench: Bench, name: str, took_ms: float, result: RunResult = DONE, **more: Any) -> None:
    bench.task(name, **more)
    bench.now += took_ms
    bench.do(bench.pool.result("w", name, bench.last_run(name).attempt, result, bench.now))
    bench.land()


def bench_with(costs: Costs) -> Bench:
    bench = Bench()
    bench.worker()
    bench.do(bench.pool.beat("w", WorkerState(costs=costs), bench.now))
    return bench


def test_both_estimators_are_held_against_what_it_took() -> None:
    bench = bench_with(Costs(token_ms=10.0))
    run_one(bench, "r", 100.0, tokens=7)  # 3 to read and 7 to generate

    said = bench.pool.accuracy.summary()
    assert set(said) == {"eq3", "processor-sharing"}
    assert said["eq3"] == {
        "requests": 1,
        "mean_absolute_ms": 0.0,
        "mean_longer_ms": 0.0,
        "mean_absolute_share": 0.0,
        "mean_ratio": 1.0,
    }
    run_one(bench, "s", 200.0, tokens=7)
    assert bench.pool.accuracy.summary()["eq3"]["mean_longer_ms"] == pytest.approx(50.0)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.FAILED])
def test_what_did_not_come_to_its_own_end_says_nothing(reason: FinishReason) -> None:
    bench = bench_with(Costs(token_ms=10.0))
    run_one(bench, "r", 100.0, RunResult(reason))
    assert bench.pool.accuracy.summary() == {}


def test_nothing_is_estimated_while_nothing_is_known_of_the_worker() -> None:
    bench = bench_with(Costs())
    run_one(bench, "r", 100.0)
    assert bench.pool.accuracy.summary() == {}


def test_one_that_ran_twice_says_nothing() -> None:
    bench = bench_with(Costs(token_ms=10.0))
    bench.task("r")
    bench.do(bench.pool.given_back("w", "r", bench.last_run().attempt, bench.now))
    bench.pass_ms(60, alive=("w",))
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    assert bench.pool.accuracy.summary() == {}


def test_those_that_wait_are_estimated_anew_once_answers_are_known() -> None:
    """At first 64 tokens of memory are expected of each, so one of two has no room; then 2."""
    bench = Bench(replace(CONFIG, max_waiting=40))
    capacity = Capacity(max_running=40, max_queued=0, kv_tokens=20 * 66)
    bench.do(bench.pool.worker_reached("w", capacity, bench.now))
    bench.do(bench.pool.listed("w", [], bench.now))
    for number in range(40):
        bench.task(f"r{number}", tokens=500)
    worker = bench.pool.workers["w"]
    assert len(worker.placed) == 20
    before = bench.pool.entries["r39"].pending
    for number in range(ENOUGH):
        done = RunResult(FinishReason.STOP, 3, (7, 8))
        bench.do(bench.pool.result("w", f"r{number}", bench.last_run(f"r{number}").attempt, done, bench.now))
        bench.land()
    after = bench.pool.entries["r39"].pending
    assert before is not None
    assert after is not None
    assert (before.kv_need, before.expected_tokens) == (66, 500)
    assert (after.kv_need, after.expected_tokens) == (4, 2)
    assert len(worker.placed) == 40 - ENOUGH


def test_every_reader_of_the_journal_learns_lengths_from_outcomes() -> None:
    bench = bench_with(Costs(token_ms=10.0))
    for number in range(ENOUGH):
        run_one(bench, f"r{number}", 10.0, RunResult(FinishReason.STOP, 3, (7, 8)), tokens=500)
    bench.task("next", tokens=500)
    pending = bench.pool.entries["next"].pending
    assert pending is not None
    assert pending.expected_tokens == 2
    after = Bench(active=False)
    after.pool.take_over(0, 0)
    for record in bench.journal:
        after.read(record)
    after.do(after.pool.claim(after.now))
    after.land()
    after.task("next", tokens=500)
    learnt = after.pool.entries["next"].pending
    assert learnt is not None
    assert learnt.expected_tokens == 2


def test_a_pool_lets_one_wait_that_would_spoil_anothers_slo_until_that_has_ended() -> None:
    bench = bench_with(Costs(token_ms=10.0))
    bench.pool.policy = EmoePlacement()

    def arrive(name: str, slo: Slo) -> None:
        request = Request(
            request_id=name,
            pool=0,
            model="m",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=5),
            accepted_ms=int(bench.now),
            deadline_ms=int(bench.now + 60_000),
            slo=slo,
        )
        bench.record(Task(request=request, task_type="t"))

    arrive("first", Slo(e2e_ms=100.0))  # 80 ms alone, 160 with another
    arrive("second", Slo())
    assert bench.pool.entries["second"].worker is None
    bench.now += 80.0
    bench.do(bench.pool.result("w", "first", bench.last_run("first").attempt, DONE, bench.now))
    bench.land()
    assert bench.pool.entries["second"].worker == "w"


def test_a_workers_word_that_is_no_time_is_passed_over() -> None:
    loads = {"nan": math.nan, "endless": math.inf, "before": -1.0, "good": 2.0}
    assert _costs(worker_pb2.WorkerState(token_ms=math.nan, load_ms_by_task=loads)) == Costs(
        token_ms=0.0, load_ms_by_task={"good": 2.0}
    )
    many = {f"t{number:05}": 1.0 for number in range(5000)}
    assert len(_costs(worker_pb2.WorkerState(load_ms_by_task=many)).load_ms_by_task) == 1024


def test_ratios_are_counted_in_classes() -> None:
    accuracy = Accuracy()
    for real in (50.0, 100.0, 105.0, 5000.0):
        accuracy.add({"eq3": 100.0}, real)
    accuracy.add({"eq3": 0.0}, 10.0)
    accuracy.add({"eq3": 10.0}, 0.0)
    errors = accuracy.by_estimator["eq3"]
    assert {end: count for end, count in zip([*RATIOS, math.inf], errors.classes, strict=True) if count} == {
        0.5: 1,
        1.0: 1,
        1.1: 1,
        math.inf: 1,
    }
    assert errors.absolute_ms == 50.0 + 0.0 + 5.0 + 4900.0


def test_the_errors_are_metrics() -> None:
    bench = bench_with(Costs(token_ms=10.0))
    run_one(bench, "r", 150.0, tokens=7)

    class Runner:
        pool = bench.pool

    class Service:
        runners = {3: Runner()}  # noqa: RUF012

    registry = CollectorRegistry()
    registry.register(SchedulerCollector(Service()))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert 'greenroom_scheduler_latency_ratio_bucket{estimator="eq3",le="1.5",pool="3"} 1.0' in text
    assert 'greenroom_scheduler_latency_ratio_bucket{estimator="eq3",le="1.25",pool="3"} 0.0' in text
    assert 'greenroom_scheduler_latency_ratio_sum{estimator="processor-sharing",pool="3"} 1.5' in text
    assert 'greenroom_scheduler_latency_error_seconds_total{estimator="eq3",pool="3"} 0.05' in text
