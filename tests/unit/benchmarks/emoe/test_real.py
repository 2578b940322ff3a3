from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from benchmarks.emoe.check import plots, real_requests, stage
from benchmarks.emoe.check.real_requests import Came, Crowd, Sent, all_at_once, alone_requests, plan
from benchmarks.emoe.check.server_overhead import Beyond, overhead_of
from benchmarks.emoe.check.stage import Really, Round, Scale, _measured, _point, _worst, both, compared, table
from benchmarks.emoe.scheduling.schedulers import FCFS
from benchmarks.emoe.scheduling.simulator import Machine
from benchmarks.emoe.scheduling.step_costs import ServingOverhead
from benchmarks.emoe.step_times import mean_of
from benchmarks.harness.reporting.statistics import geometric, interval
from greenroom.core.model_profile import MeasuredCosts
from greenroom.demo.tasks import TASKS
from tests.unit.benchmarks.emoe.profiles import COSTS, profile

ALONE = dict.fromkeys(TASKS, 100.0)


def test_a_plan_is_the_same_for_every_server_and_at_the_rate_that_is_asked_for() -> None:
    sent = plan(rate=5.0, count=400, seed=1, alone_ms=ALONE)
    assert sent == plan(rate=5.0, count=400, seed=1, alone_ms=ALONE)
    assert len(sent) == 400
    assert sent[-1].at_s == pytest.approx(80.0, rel=0.15)
    assert {one.slo_ms for one in sent} == {200.0, 500.0, 1000.0}
    assert {one.task for one in sent} == set(TASKS)


def test_the_simulation_has_the_tokens_that_requests_really_had_and_of_those_without_an_answer_their_tasks() -> None:
    sent = plan(rate=50.0, count=30, seed=1, alone_ms=ALONE)
    came = [Came(3, 2, one.at_s + 0.05) for one in sent[:-1]] + [Came(why="shed")]
    machine = Machine(profile=profile(), max_running=4, kv_tokens=4096)
    really, simulated = both("fcfs", sent, came, machine)
    assert [one.job for one in really] == [one.job for one in simulated]
    assert {(one.job.input_tokens, one.job.output_tokens) for one in simulated} == {(3, 2)}
    assert really[0].latency_ms == pytest.approx(50.0)
    assert really[-1].latency_ms is None
    assert simulated[-1].latency_ms is not None


def test_a_check_says_how_far_the_simulator_is_from_real_servers(tmp_path: Path) -> None:
    def side(times: float) -> dict[str, float]:
        return {"mean_latency_ms": 100.0 * times, "throughput": 3.0 / times, "goodput": 2.0, "attainment": 0.5,
                "given_up": 0}  # fmt: skip

    runs = [
        {"arm": "fcfs", "load": load, "real": side(1.0), "simulated": side(times), "bare": side(times / 2)}
        for load, times in ((1.0, 1.1), (1.0, 1.1), (0.5, 9.0))
    ]
    point = _point("fcfs", 1.0, runs)
    assert point["ratio"]["mean_latency_ms"]["mean"] == pytest.approx(1.1)
    assert point["ratio"]["throughput"]["mean"] == pytest.approx(1 / 1.1)
    assert point["ratio_bare"]["mean_latency_ms"]["mean"] == pytest.approx(0.55)
    found = {
        "saturation_per_s": {"real": interval([3.0, 3.0]), "simulated": interval([2.5, 2.5])},
        "saturation_ratio": geometric([2.5, 2.5], [3.0, 3.0]), "alone_ms": {"real": ALONE, "simulated": ALONE},
        "points": [point], "overhead": {"request_ms": 8.0, "step_ms": 1.0, "row_ms": 0.5},
        "simulator_error": 0.1,
        "simulator_errors": {"mean_latency_ms": 0.1, "throughput": 0.09, "goodput": None},
        "simulator_errors_bare": {"mean_latency_ms": 0.45, "throughput": 0.8, "goodput": None},
        "goodput_over_fcfs": {"1": {"real": geometric([3.0], [2.0]), "simulated": None}},
    }  # fmt: skip
    said = table(found)
    assert "saturated at 3.00 ± 0.00/s, simulated 2.50 ± 0.00/s: × 0.83 ± 0.00" in said
    assert "1.10 ± 0.00" in said
    assert "8.0 ms a request, 1.00 ms a step, 0.500 ms a sequence" in said
    assert "mean_latency_ms 10% (45%)" in said
    assert "[simulator_error ≤ 0.1]: 10%" in said
    assert "at 1: really 1.50 ± 0.00, simulated -" in said
    plots.draw_check([point], tmp_path / "check.png")


def measured(times: float = 1.0) -> MeasuredCosts:
    return structs.replace(COSTS, prompt_step_ms={8: 40.0 * times})


def machine(steps: MeasuredCosts) -> Machine:
    return Machine(profile=profile(), really=steps, max_running=4, kv_tokens=4096)


def test_steps_count_as_their_mean_before_and_after_at_sizes_that_both_have() -> None:
    before, after = measured(1.0), structs.replace(measured(2.0), token_ms_by_rows={1: 20.0, 8: 1.0})
    found = mean_of(before, after)
    assert found.token_ms_by_rows == {1: 15.0}
    assert found.prompt_step_ms == {8: 60.0}


def test_servers_take_turns_on_the_same_requests_and_steps_are_measured_before_and_after_each_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    asked: list[tuple[str, tuple[Sent, ...]]] = []

    async def send(url: str, model: str, sent: Sequence[Sent], *, at_once: int = 0) -> tuple[list[Came], float]:
        if len(sent) == scale.requests:
            asked.append((url, tuple(sent)))
            done.append("run")
        return [Came(3, 2, one.at_s + 0.05) for one in sent], 2.0

    def measure() -> MeasuredCosts:
        done.append("steps")
        return measured(len(done))

    monkeypatch.setattr(real_requests, "send", send)
    monkeypatch.setattr(stage, "send", send)
    scale = Scale(requests=9, loads=(0.5, 1.0), seeds=2, saturating=10, alone=1)
    servers: Any = {arm: SimpleNamespace(url=arm) for arm in ("fcfs", "emoe")}
    really = asyncio.run(_measured(servers, "small", measure, scale, max_running=4))
    assert done == ["steps", "steps", *["run"] * 4, "steps", *["run"] * 4, "steps"]
    rounds = list(zip(asked[::2], asked[1::2], strict=True))
    assert all({first[0], second[0]} == {"fcfs", "emoe"} and first[1] == second[1] for first, second in rounds)
    found = compared(really, machine, scale)
    assert found["saturation_per_s"]["real"]["mean"] == 5.0
    assert [(point["arm"], point["load"]) for point in found["points"]] == [
        ("fcfs", 0.5), ("emoe", 0.5), ("fcfs", 1.0), ("emoe", 1.0)
    ]  # fmt: skip
    assert found["alone_ms"]["real"]["classify"] == 2000.0
    errors = found["simulator_errors"]
    assert set(errors) == {"mean_latency_ms", "throughput", "goodput"}
    assert _worst({"mean_latency_ms": 0.04, "throughput": 0.3, "goodput": 0.1}) == 0.3
    assert _worst({"mean_latency_ms": 0.04, "goodput": None}) is None, "goodput alike"


def test_a_server_that_takes_what_the_simulator_is_told_is_simulated_to_the_point() -> None:
    """The overhead is found again from requests alone and crowds, and the rounds then come out as they were."""
    truth = ServingOverhead(request_ms=8.0, step_ms=2.0, row_ms=0.5)
    slow = Machine(profile=profile(), max_running=4, kv_tokens=4096, overhead=truth)
    scale = Scale(requests=30, loads=(1.0,), seeds=2, saturating=20, alone=3)

    def served(arm: str, asked: Sequence[Sent], *, tokens: int = 2) -> tuple[Came, ...]:
        came = [Came(3, tokens + number % 3, 0.0) for number in range(len(asked))]
        _, simulated = both(arm, asked, came, slow)
        return tuple(
            Came(got.tokens_in, got.tokens_out, 1e-3 * (one.end_ms or 0.0))
            for got, one in zip(came, simulated, strict=True)
        )

    def crowd(asked: Sequence[Sent], tokens: int = 2) -> Crowd:
        came = served(FCFS, asked, tokens=tokens)
        return Crowd(tuple(asked), came, max(one.end_s or 0.0 for one in came))

    alone = {
        task: [crowd(one, tokens=2 + place) for one in alone_requests(task, 3)] for place, task in enumerate(TASKS)
    }
    rounds = [
        Round(arm, 1.0, seed, asked, served(arm, asked))
        for seed in range(2) for asked in [plan(20.0, 30, seed, ALONE)] for arm in ("fcfs", "emoe")
    ]  # fmt: skip
    really = Really(alone, [crowd(all_at_once(20, seed)) for seed in range(2)], rounds, [measured()] * 4)

    def same(steps: MeasuredCosts) -> Machine:
        return Machine(profile=profile(), max_running=4, kv_tokens=4096)

    found = compared(really, same, scale)
    assert found["overhead"] == pytest.approx({"request_ms": 8.0, "step_ms": 2.0, "row_ms": 0.5}, rel=0.15)
    errors, bare = found["simulator_errors"], found["simulator_errors_bare"]
    assert errors["mean_latency_ms"] < 0.02 < bare["mean_latency_ms"]


def test_what_a_server_takes_is_split_into_requests_steps_and_sequences_and_is_never_below_nothing() -> None:
    alone = [Beyond(ms=8.0 + 2.5 * steps, steps=steps, rows=steps) for steps in (2, 5, 9, 20)]
    crowd = Beyond(ms=8.0 + 2.0 * 50 + 0.5 * 800, steps=50, rows=800)
    found = overhead_of(alone, [crowd])
    assert (found.request_ms, found.step_ms, found.row_ms) == pytest.approx((8.0, 2.0, 0.5))
    assert overhead_of([Beyond(-3.0, 2, 2), Beyond(-9.0, 4, 4)], [crowd]) == ServingOverhead()
    assert overhead_of(alone, [Beyond(-10.0, 50, 800)]).row_ms == 0.0
    disturbed = Beyond(ms=9000.0, steps=50, rows=800)
    assert overhead_of(alone, [crowd, disturbed, crowd]) == overhead_of(alone, [crowd])


def test_a_server_that_answers_nothing_ends_the_check_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(url: str, model: str, sent: Sequence[Sent], *, at_once: int = 0) -> tuple[list[Came], float]:
        return [Came(why="model_not_found") for _ in sent], 1.0

    monkeypatch.setattr(real_requests, "send", send)
    with pytest.raises(RuntimeError, match="none of 4 requests: model_not_found"):
        asyncio.run(real_requests.crowd("url", "small", all_at_once(4, 0)))
