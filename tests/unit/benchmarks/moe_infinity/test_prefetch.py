"""Prefetching by itself: what counts as foreseen, by hand, and the stage on the smallest scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.moe_infinity.prefetch import draw, recall_and_latency, table
from benchmarks.moe_infinity.prefetch.cells import Arm, Cell, World, measure, of_sequences, prepared
from benchmarks.moe_infinity.prefetch.prefetch_alone import PrefetchAlone
from benchmarks.moe_infinity.prefetch.recall_and_latency import OURS, REUSE
from benchmarks.moe_infinity.simulated_models import recorded, switch_base
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay, TimedResult
from tests.unit.benchmarks.moe_infinity.tiny_worlds import serially, tiny

PAGE = 4096


def alone_on(trace: RoutingTrace, name: str, *, layer_s: float, **options: Any) -> tuple[PrefetchAlone, TimedResult]:
    """An expert takes the link a second."""
    setup = TimedReplay(trace, PAGE, LinkProfile(PAGE), ComputeProfile(layer_s=layer_s), queue_ahead=8)
    policy = PrefetchAlone(create_policy(name, catalogue=setup.catalogue(), options=options))
    return policy, setup.run(policy, trace.steps(), setup.catalogue().size)


def always(expert: int, steps: int, layers: int = 2, width: int = 4) -> RoutingTrace:
    picks = np.full((steps, layers, 1), expert, dtype=np.uint8)
    return RoutingTrace(picks, np.array([0, steps]), width)


def test_nothing_is_kept_so_what_is_not_fetched_ahead_is_fetched_again() -> None:
    policy, result = alone_on(always(0, steps=5), "lru", layer_s=10)
    assert (policy.covered, policy.used) == (0, 10)
    assert result.bytes_moved == 10 * PAGE


def test_what_landed_before_its_layers_router_spoke_is_covered() -> None:
    policy, _ = alone_on(always(0, steps=5), "top-k", layer_s=10, count=1)
    assert (policy.covered, policy.used) == (9, 10)  # all but the first of all


def test_what_comes_late_is_not_covered_nor_is_it_taken_for_foreseen_at_the_next_step() -> None:
    policy, result = alone_on(always(0, steps=5), "top-k", layer_s=0.5, count=1)
    assert policy.covered == 0
    assert result.prefetches_used == 9  # on their way, which is what the engine counts as used


def test_a_link_brings_no_more_than_it_can_in_a_layers_time() -> None:
    policy, _ = alone_on(always(3, steps=5), "top-k", layer_s=3.9, count=4)  # 0, 1 and 2 have landed, not 3
    assert policy.covered == 0
    policy, _ = alone_on(always(2, steps=5), "top-k", layer_s=3.9, count=4)
    assert policy.covered == 9


def test_every_policy_replays_the_same_sequences_and_learns_from_those_before() -> None:
    world = World(tiny(), seed=1, learnt=12, served=3)
    ready = prepared(world)
    assert ready.served.sequences == 3
    assert ready.uses.sum() > 0
    cells = [Cell(world, arm, 32e9, 1, alone=True) for arm in (OURS, Arm("all", "top-k", {"count": 6}))]
    ours, all_layers = (measure(cell) for cell in cells)
    assert ours.recall is not None
    assert all_layers.recall is not None
    assert (
        0 < ours.recall < all_layers.recall < 1
    )  # the link brings whole layers here; neither foresees a prompt's first
    assert ours.recall_decoding is not None
    assert ours.recall_decoding != ours.recall
    kept = measure(replace(cells[0], alone=False))
    assert kept.recall is None
    assert kept.ready > ours.ready
    assert kept.waits_ms == tuple(sorted(kept.waits_ms))


def test_reuse_can_be_given_coefficients_of_the_sequences_before() -> None:
    world = World(replace(tiny(), slots=4), seed=1, learnt=100, served=6)
    without, fitted = (measure(Cell(one, REUSE, 32e9, 1, alone=False)) for one in (world, replace(world, fitted=True)))
    assert (without.token_ms, without.prefetches) != (fitted.token_ms, fitted.prefetches)


def test_a_faster_link_lets_more_be_foreseen() -> None:
    world = World(tiny(layer_s=2e-3), seed=1, learnt=12, served=3)
    recalls = [measure(Cell(world, OURS, link, 1, alone=True)).recall or 0.0 for link in (8e9, 32e9, 128e9)]
    assert recalls[0] < recalls[1] < recalls[2]


def test_sequences_are_taken_in_order_and_cut() -> None:
    trace = RoutingTrace(np.arange(6, dtype=np.uint8).reshape(6, 1, 1), np.array([0, 1, 3, 6]), 8)
    some = of_sequences(trace, [2, 0], rows=2)
    assert some.experts.ravel().tolist() == [3, 4, 0]
    assert some.seq_starts.tolist() == [0, 2, 3]


def test_a_recorded_trace_is_shuffled_by_the_seed_and_split(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    RoutingTrace(np.zeros((40, 2, 1), dtype=np.uint8), np.arange(0, 41, 4), 3).save(path)
    model = recorded(path)
    assert (model.shape.layers, model.shape.experts, model.slots) == (2, 3, 2)
    ready = prepared(World(model, seed=0, learnt=6, served=3, rows=2))
    assert (ready.served.sequences, ready.served.tokens) == (3, 6)


def test_all_k_up_to_a_layers_experts_are_tried() -> None:
    plan = recall_and_latency.Plan(switch_base(32), 32e9, (), 1, 1, 1, counts_step=1, fitted=False)
    assert [[arm.options["count"] for arm in family] for family in plan.families] == [[32, 16, 8, 4, 2, 1]] * 2
    thinned = replace(plan, counts_step=3)
    assert [arm.options["count"] for arm in thinned.families[0]] == [32, 4]


def test_the_stage_gives_every_figure_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_and_latency, "in_processes", serially)
    monkeypatch.setattr(recall_and_latency, "MODELS", {"tiny": tiny()})
    path = tmp_path / "routing.npz"
    RoutingTrace(np.zeros((640, 2, 1), dtype=np.uint8), np.arange(0, 641, 4), 3).save(path)
    scale = recall_and_latency.Scale(
        seeds=2, learnt=6, served=1, fitted=False, at_once=(1,), counts_step=2, experts=(8,), links=(32e9,),
        models=("tiny",), trace=path, trace_seeds=1, trace_links=(32e9,),
    )  # fmt: skip

    found = recall_and_latency.run(scale)

    assert [row["model"] for row in found["bandwidth"]] == ["tiny", "routing"]
    for row in (*found["experts"], *found["bandwidth"]):
        assert all(0 <= arm["recall"]["mean"] <= 1 for arm in row["arms"].values())
        assert {"k"} == {key for arm in row["arms"].values() for key in arm} - {"recall", "decoding"}
    assert set(found["latency"][0]["arms"]) >= {"moe-infinity", "refinement off", "priorities off", "top-k", "lru"}
    json.dumps(found)
    assert "Fig. 10" in table(found)
    draw(found, tmp_path / "prefetch.png")
    assert (tmp_path / "prefetch.png").stat().st_size > 0
