from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.emoe import plots, real
from benchmarks.emoe.measures import geometric, interval
from benchmarks.emoe.real import Came, Scale, Sent, _compare, _point, both, plan, table
from benchmarks.emoe.simulate import Machine
from greenroom.demo.tasks import TASKS
from tests.unit.benchmarks.emoe.profiles import profile

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
        {"arm": "fcfs", "load": 1.0, "real": side(1.0), "simulated": side(times)} for times in (1.1, 1.1)
    ] + [{"arm": "fcfs", "load": 0.5, "real": side(1.0), "simulated": side(9.0)}]  # fmt: skip
    point = _point("fcfs", 1.0, runs)
    assert point["ratio"]["mean_latency_ms"]["mean"] == pytest.approx(1.1)
    assert point["ratio"]["throughput"]["mean"] == pytest.approx(1 / 1.1)
    found = {
        "saturation_per_s": {"real": interval([3.0, 3.0]), "simulated": interval([2.5, 2.5])},
        "saturation_ratio": geometric([2.5, 2.5], [3.0, 3.0]), "alone_ms": {"real": ALONE, "simulated": ALONE},
        "points": [point],
    }  # fmt: skip
    said = table(found)
    assert "saturated at 3.00 ± 0.00/s, simulated 2.50 ± 0.00/s: × 0.83 ± 0.00" in said
    assert "1.10 ± 0.00" in said
    plots.draw_check([point], tmp_path / "check.png")


def test_servers_take_turns_on_the_same_requests_and_steps_are_measured_before_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, tuple[Sent, ...]]] = []
    measured = 0

    async def send(url: str, model: str, sent: Sequence[Sent], *, at_once: int = 0) -> tuple[list[Came], float]:
        if len(sent) == scale.requests:
            asked.append((url, tuple(sent)))
        return [Came(3, 2, one.at_s + 0.05) for one in sent], 2.0

    def machine() -> Machine:
        nonlocal measured
        measured += 1
        return Machine(profile=profile(), max_running=4, kv_tokens=4096)

    monkeypatch.setattr(real, "send", send)
    scale = Scale(requests=9, loads=(0.5, 1.0), seeds=2, saturating=10, alone=1)
    servers: Any = {arm: SimpleNamespace(url=arm) for arm in ("fcfs", "emoe")}
    found = asyncio.run(_compare(servers, "small", machine, scale, max_running=4))
    assert found["saturation_per_s"]["real"]["mean"] == 5.0
    assert measured == 1 + scale.seeds + len(scale.loads) * scale.seeds
    rounds = list(zip(asked[::2], asked[1::2], strict=True))
    assert len(rounds) == 4
    assert all({first[0], second[0]} == {"fcfs", "emoe"} and first[1] == second[1] for first, second in rounds)
    assert [(point["arm"], point["load"]) for point in found["points"]] == [
        ("fcfs", 0.5), ("emoe", 0.5), ("fcfs", 1.0), ("emoe", 1.0)
    ]  # fmt: skip
    assert found["alone_ms"]["real"]["classify"] == 2000.0
    assert found["alone_ms"]["simulated"]["classify"] == 31.0
    assert set(found["simulator_error"]) == {"mean_latency_ms", "throughput", "goodput"}
