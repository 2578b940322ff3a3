"""Hit rates without prefetching: which streams, and what the figures are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.moe_infinity.cache import draw, hit_rates, routing_streams, table
from benchmarks.moe_infinity.cache.hit_rates import (
    AT_MAIN,
    BY_LAYER,
    INFORMED,
    LITERAL,
    OURS,
    POLICIES,
    REAL,
    REUSE,
    Row,
    Scale,
    figures,
    rows_of,
    run,
)
from benchmarks.moe_infinity.cache.routing_streams import Stream, real_stream, shifting, synthetic_stream
from benchmarks.moe_infinity.calibration import TARGETS
from benchmarks.moe_infinity.synthetic_routing import MIXES, NLLB, SWITCH
from benchmarks.moe_infinity.synthetic_routing import trace_of as world_of
from greenroom.demo.tasks import TASKS
from greenroom.policies.base.events import Artifact
from greenroom.predictor.kinds.reuse.fit import FitOptions, fit
from greenroom.replay import RoutingTrace
from greenroom.replay.sweeps.sweep import OPTIMUM, PolicySpec
from tests.unit.replay.traces import trace_of

SHORT = FitOptions(followers=False, rounds=1, steps=1, held_out=0.4)


def rows(**rates: dict[str, list[float]]) -> list[Row]:
    """By stream (``switch``, ``nllb``) and policy, a rate for each world; what is not given is 10."""
    found = []
    for stream, shape in (("switch", SWITCH), ("nllb", NLLB)):
        for policy in (*POLICIES, *AT_MAIN, "belady"):
            values = rates.get(stream, {}).get(policy, [10.0, 10.0])
            place = TARGETS[shape.name].slots, MIXES[shape.name].at_once
            found.append(Row(shape.name, policy, *place, dict(enumerate(values))))
    return found


def test_the_gap_is_the_worse_models_and_the_gain_too() -> None:
    found = figures(
        rows(
            switch={"belady": [56.0, 58.0], OURS: [50.0, 55.0], "lfu": [30.0, 34.0], BY_LAYER: [18.0, 18.0]},
            nllb={"belady": [43.0, 43.0], OURS: [40.0, 40.0], "lru": [21.0, 21.0]},
        )
    )
    assert found["oracle_gap_points"] == 4.5
    assert found["gain_over_best_baseline"] == 19.0
    assert found["real_gap_points"] is None
    switch = found["synthetic"][SWITCH.name]
    assert switch["best_baseline"] == "lfu"
    assert switch["oracle_gap"] == [4.5, pytest.approx(2.12, abs=0.01)], "spread of the difference, not of the rates"
    assert switch["over"]["lfu-reset"]["layer decay alone"] == [8.0, 0.0]
    assert switch["over"]["lfu"]["both"] == [20.5, pytest.approx(0.71, abs=0.01)]


def test_the_real_gap_is_one_policys_at_its_worse_concurrency() -> None:
    real = [
        Row(REAL, policy, 256, at_once, {0: rate})
        for at_once, rates in (
            (1, {"belady": 90.0, OURS: 89.0, REUSE: 82.0}),
            (8, {"belady": 60.0, OURS: 45.0, REUSE: 53.0}),
        )
        for policy, rate in rates.items()
    ]  # fmt: skip
    found = figures([*rows(), *real])
    assert found["real_gap_points"] == 8.0, "not 1 of the one and 7 of the other"
    assert found["real_gaps"][OURS] == {"1 at once": 1.0, "8 at once": 15.0}


def test_rates_of_worlds_come_together() -> None:
    trace = trace_of(3, 3)
    streams = [Stream("drawn", trace, (2,), 2, (4,), (), seed=seed) for seed in (3, 4)]
    streams.append(Stream("gpt", trace, (2,), 2, (1,), (), tokens=5))
    lru = PolicySpec.parse("lru")
    found = rows_of(streams, [(0, (4, lru, 2), 30.0), (1, (4, lru, 2), 40.0), (2, (1, OPTIMUM, 2), 50.0)])
    assert found == [Row("drawn", "lru", 2, 4, {3: 30.0, 4: 40.0}), Row(REAL, "belady", 2, 1, {0: 50.0})]
    assert found[0].mean == 35.0


def test_a_synthetic_world_is_learnt_from_other_sequences_than_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[RoutingTrace] = []

    def learn(trace: RoutingTrace, options: FitOptions | None) -> tuple[Artifact, ...]:
        learnt.append(trace)
        return ()

    monkeypatch.setattr(routing_streams, "artifacts_of", learn)
    stream = synthetic_stream(NLLB, 1, 20, 30, curve=True)
    assert stream.trace.sequences == 20
    assert stream.main == 60
    assert stream.slots == (30, 60, 112, 180, 300), "4 to 40 GB, of which 8 hold 60"
    assert learnt[0].sequences == 30
    assert stream.shares is not None
    assert len(stream.shares) == 20
    both = np.concatenate((learnt[0].experts, stream.trace.experts))
    assert np.array_equal(both, world_of(NLLB, MIXES[NLLB.name], 50, seed=1).experts)
    assert synthetic_stream(SWITCH, 1, 20, 30, curve=False).slots == (535,)


def test_what_is_learnt_of_a_recorded_routing_never_ran_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[RoutingTrace] = []

    def learn(trace: RoutingTrace) -> tuple[Artifact, ...]:
        learnt.append(trace)
        return ()

    monkeypatch.setattr(routing_streams, "artifacts_of", learn)
    trace_of(*[10] * 40, layers=2, experts=6).save(tmp_path / "t.npz")
    stream = real_stream(tmp_path / "t.npz", tokens=100)
    assert stream.slots == (4,)
    used = {int(one) for step in stream.trace.steps(concurrent=8, tokens=100) for one in step.sequences}
    assert max(used) < stream.trace.sequences
    assert stream.trace.sequences + learnt[0].sequences == 40


def test_the_mix_moves_on_from_task_to_task() -> None:
    asked = shifting(1000, seed=1)
    for number, task in enumerate(TASKS):
        around = asked[max(0, 200 * number - 40) : 200 * number + 40]
        assert Counter(one.task for one in around).most_common(1)[0][0] == task
        assert len({one.task for one in around}) == len(TASKS), "the others never cease"


def test_a_small_run_has_every_policy_and_all_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def here(
        work: Callable[..., float], items: Sequence[Any], jobs: int, finished: Callable[[], object]
    ) -> list[float]:
        return [work(item, lambda: None) for item in items]

    def streams(scale: Scale) -> list[Stream]:
        return [synthetic_stream(shape, seed, 12, 20, curve=seed == 0) for shape in (SWITCH, NLLB) for seed in range(2)]

    monkeypatch.setattr(routing_streams, "fit", lambda trace, options: fit(trace, SHORT))
    monkeypatch.setattr(hit_rates, "in_processes", here)
    monkeypatch.setattr(hit_rates, "_streams", streams)
    found = run(Scale())
    by_place = {(row["stream"], row["policy"], row["slots"]): row["hit_rate"] for row in found["rows"]}
    assert by_place[SWITCH.name, OURS, 535] == by_place[SWITCH.name, LITERAL, 535], "they differ in prefetches alone"
    for (stream, policy, slots), rate in by_place.items():
        assert rate <= by_place[stream, "belady", slots], (stream, policy, slots)
    assert by_place[NLLB.name, INFORMED, 60] > by_place[NLLB.name, "lru", 60]
    assert found["oracle_gap_points"] >= 0
    shown = table(found)
    assert "moe-infinity:literal=true" in shown
    assert "NOT as calibrated" in shown, "a dozen sequences are no measurement"
    draw(found, tmp_path / "cache.png")
    assert (tmp_path / "cache.png").stat().st_size > 10_000
