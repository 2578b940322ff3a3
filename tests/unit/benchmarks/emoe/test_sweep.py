from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emoe.scheduling import plots
from benchmarks.emoe.scheduling.jobs import of_profile
from benchmarks.emoe.scheduling.schedulers import ARMS, EMOE, FCFS
from benchmarks.emoe.scheduling.simulator import Machine
from benchmarks.emoe.scheduling.stage import table
from benchmarks.emoe.scheduling.step_costs import ExpertSets
from benchmarks.emoe.scheduling.sweep import TASKS, Scale, Traffic, figures, points, run_all
from tests.unit.benchmarks.emoe.profiles import profile

SCALE = Scale(
    seeds=2, times_at_saturation=1, requests=40, loads=(0.5, 1.0), label_accuracies=(1.0, 0.0), saturating_requests=40
)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    machine = Machine(profile=profile(), share=0.5, max_running=8, kv_tokens=4096)
    return Traffic.of(TASKS, of_profile(profile(), max_tokens=16), None, machine, SCALE.saturating_requests)


def test_what_is_known_of_traffic_comes_from_the_machine_alone(traffic: Traffic) -> None:
    assert set(traffic.alone_ms) == {"short", "long"}
    assert traffic.alone_ms["short"] < traffic.alone_ms["long"]
    # no faster than if all steps were prompts of the largest kind, no slower than one request after the other
    assert 1e3 / traffic.alone_ms["long"] < traffic.saturation < 1e3 / (5.0 * 5.5)


@pytest.fixture(scope="module")
def rows(traffic: Traffic) -> list[dict[str, Any]]:
    told: list[None] = []
    found = run_all([traffic], SCALE, lambda: told.append(None), processes=0)
    assert len(found) == len(told) == len(points(SCALE, [TASKS]))
    return found


def test_a_whole_sweep_with_its_figures_and_pictures(
    traffic: Traffic, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = figures(rows)
    steps = found["sweeps"][TASKS]
    assert [step["load"] for step in steps] == [0.5, 1.0]
    assert all(set(step["arms"]) == set(ARMS) for step in steps)
    at = steps[1]["arms"]
    ratios = [
        ours["goodput"] / theirs["goodput"] for ours, theirs in zip(_at(rows, EMOE), _at(rows, FCFS), strict=True)
    ]
    assert found["goodput_ratio_fcfs"] == pytest.approx(statistics.geometric_mean(ratios), abs=1e-3)
    assert set(steps[1]["ratios_fcfs"]) == set(ARMS) - {FCFS}
    assert at[EMOE]["goodput"]["mean"] == pytest.approx(statistics.fmean(one["goodput"] for one in _at(rows, EMOE)))
    assert [step["accuracy"] for step in found["labels"]["by_accuracy"]] == [1.0, 0.0]
    assert found["labels"]["by_accuracy"][0]["latency_change_percent"]["mean"] == 0.0
    assert set(found["estimate_errors"]) == {"eq3", "processor-sharing"}
    plots.draw_sweep(steps, traffic.saturation, "tasks", tmp_path / "sweep.png")
    plots.draw_tasks(steps[1], tmp_path / "tasks.png")
    plots.draw_labels(found["labels"], SCALE.label_load, tmp_path / "labels.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("sweep", "tasks", "labels"))


def _at(rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    plain = [row for row in rows if row["label_accuracy"] is None and row["labels"]]
    return [row for row in plain if row["arm"] == arm and row["load"] == 1.0]


def test_at_saturation_there_are_more_seeds_and_nothing_is_run_twice() -> None:
    found = points(replace(SCALE, times_at_saturation=3), [TASKS])
    assert len(set(found)) == len(found)
    seeds = {load: {one.seed for one in found if one.load == load and one.arm == FCFS} for load in SCALE.loads}
    assert seeds == {0.5: {0, 1}, 1.0: set(range(6))}


def test_a_table_says_whether_any_load_is_below_first_come_first_served(rows: list[dict[str, Any]]) -> None:
    found = figures(rows)
    found["traffic"] = {TASKS: {"saturation_per_s": 3.0, "alone_ms": {"short": 30.0}}}
    assert "at any load: yes" in table(found) or "at any load: NO" in table(found)
    assert "at any load: NO" in table({**found, "never_below_fcfs": False})
    assert "labels 0% right: mean latency" in table(found)


def test_a_worker_holds_what_its_mix_wants_and_no_more_than_fits() -> None:
    sets = ExpertSets(profile(), share=0.5)
    assert sets.resident.sum() == 4
    assert sets.bring({"short": 5.0}) > 0
    assert sets.resident[:, :2].all()
    assert sets.bring({"short": 50.0}) == 0  # the same mix
    assert sets.missing({"long": 12.0}) == 2  # nothing is said of layer 0, where long is insensitive
    assert sets.bring({"long": 12.0}) == 2
    assert sets.resident[1].tolist() == [False, False, True, True]
    assert sets.load_ms_by_task({"long": 12.0})["long"] == 0.0
    assert ExpertSets(profile(), share=1.0).bring({"short": 5.0}) == 0
