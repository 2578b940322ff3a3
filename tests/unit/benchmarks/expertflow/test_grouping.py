"""The stage `grouping`: which replays are held against which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.expertflow.grouping.stage import QUICK, jobs, ratios
from benchmarks.expertflow.grouping.two_batches import OURS, RANDOM, TRUE, distinct_experts
from benchmarks.harness.inputs.split_routing import World
from greenroom.replay.traces.scheduled_steps import true_paths
from tests.unit.replay.traces import trace_of


def test_each_replay_is_held_against_the_same_one_without_grouping() -> None:
    cells: list[dict[str, Any]] = []
    for job in jobs(Path(), QUICK):
        plain = job.batching == "fcfs"
        grouped = 0.5 if job.known else 0.8
        cells.append(
            {
                "batching": job.batching, "running": job.running, "rows_per_forward": job.rows_per_forward,
                "known": job.known, "told": job.told, "seed": job.seed, "forwards": 1 + (job.batching == "forced"),
                "mib": 10 * (1 if plain else grouped), "ms": 4 if job.told else 5, "round_ms": 8 if plain else 16,
            }
        )  # fmt: skip
    found = ratios(cells, QUICK)
    assert found["bounded"]["token-scheduler"]["median"] == pytest.approx(0.8)
    assert found["bounded"]["token-scheduler, paths known"]["median"] == 0.5
    assert {ratio["median"] for ratio in found["across_steps"].values()} == {0.8}
    assert {ratio["median"] for ratio in found["forced"].values()} == {0.5}
    assert {ratio["median"] for ratio in found["unbounded"].values()} == {1}
    assert {ratio["median"] for ratio in found["latency"].values()} == {2}
    assert set(found["forwards"].values()) == {1}


def test_with_true_paths_foretold_nothing_of_the_saving_is_lost() -> None:
    trace = trace_of(*[5] * 12, layers=4, k=2, experts=16)
    world = World("small", trace, trace, np.arange(trace.tokens))
    (row,) = distinct_experts(world, true_paths(trace, world.rows), (4,), draws=5, seeds=2)
    assert row["share"] == {"median": 1, "min": 1, "max": 1}
    assert row["experts"][TRUE] == row["experts"][OURS]
    assert row["experts"][OURS]["median"] < row["experts"][RANDOM]["median"]
