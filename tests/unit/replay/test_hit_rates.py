"""Replay: which steps a trace gives, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.errors import BudgetTooSmall
from greenroom.policies.base.events import LayerRouting, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from greenroom.policies.replacement.lru import Lru
from greenroom.replay import ReplayCache, ReplayResult, RoutingTrace, replay
from greenroom.replay.hit_rates import optimum
from tests.unit.policies.bench import routing_of
from tests.unit.replay.traces import trace_of


def test_lru_by_hand() -> None:
    # One layer, one pick a token, two slots:  0 1 0 2 1 2  ->  miss miss hit miss(1 out) miss(0 out) hit
    picks = np.array([0, 1, 0, 2, 1, 2], dtype=np.uint8).reshape(-1, 1, 1)
    trace = RoutingTrace(picks, np.array([0, 6]), 3)

    result = replay(Lru(trace.catalogue()), trace.steps(), 2)

    assert result == ReplayResult(lookups=6, hits=2, evictions=2)
    assert result.misses == 4
    assert result.hit_rate == pytest.approx(1 / 3)


def test_a_layer_of_several_rows_looks_up_its_distinct_experts() -> None:
    picks = np.array([[[0, 1]], [[1, 2]]], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 1, 2]), 3)

    result = replay(Lru(trace.catalogue()), trace.steps(concurrent=2), 3)

    assert (result.lookups, result.hits) == (3, 0)


@pytest.mark.parametrize("name", sorted(EXPERT_POLICIES))
def test_with_room_for_all_each_expert_misses_once(name: str) -> None:
    trace = trace_of(40, 40, layers=3, k=2, experts=8)
    catalogue = trace.catalogue()

    result = replay(create_policy(name, catalogue=catalogue), trace.steps(concurrent=2), catalogue.size)

    assert result.misses == len({*map(tuple, np.argwhere(distinct(trace)))})
    assert result.evictions == 0


@pytest.mark.parametrize("name", sorted(EXPERT_POLICIES))
def test_sizes_in_bytes_are_slots_in_disguise(name: str) -> None:
    trace = trace_of(60, layers=3, k=2, experts=8)
    large, small = trace.catalogue(expert_bytes=4096), trace.catalogue()

    in_bytes = replay(create_policy(name, catalogue=large), trace.steps(), 9 * 4096 + 4095)
    in_slots = replay(create_policy(name, catalogue=small), trace.steps(), 9)

    assert in_bytes == in_slots
    assert 0 < in_slots.hits < in_slots.lookups


def test_the_experts_of_the_current_group_stay() -> None:
    catalogue = Catalogue.uniform("pool", layers=1, experts=4, top_k=2)
    cache = ReplayCache(Lru(catalogue), 2)
    cache.route(routing_of(catalogue, [0, 1]))

    cache.route(routing_of(catalogue, [2, 0]))

    assert cache.resident.tolist() == [True, False, True, False]
    assert cache.result == ReplayResult(lookups=4, hits=1, evictions=1)


def test_different_sizes_fill_slots_of_their_own_and_never_exceed_the_budget() -> None:
    catalogue = Catalogue("pool", experts_per_layer=[4, 4], top_k=[1, 1], expert_bytes=[5, 3])
    cache = ReplayCache(Lru(catalogue), 22)  # three of 3 bytes, two of 5
    for expert in (0, 1, 4, 5, 2, 6, 7, 0, 4):
        cache.route(routing_of(catalogue, [expert]))

        held = [int(np.count_nonzero(cache.resident[span])) for span in catalogue.spans]
        assert (held[1] + cache.free[0], held[0] + cache.free[1]) == (3, 2)
        assert cache.resident[expert]
    assert cache.result == ReplayResult(lookups=9, hits=0, evictions=4)
    assert cache.resident.tolist() == [True, False, True, False, True, False, True, True]


def test_layers_of_two_sizes_are_two_caches() -> None:
    trace = trace_of(60, layers=4, k=2, experts=8)
    sizes = np.array([4, 1, 1, 4])
    catalogue = replace(trace, expert_bytes=sizes).catalogue(expert_bytes=None)
    slots = SlotSizes(catalogue)

    whole = replay(Lru(catalogue), trace.steps(), slots.nbytes(14))

    parts = [replace(trace, experts=trace.experts[:, sizes == size]) for size in (1, 4)]
    alone = [replay(Lru(part.catalogue()), part.steps(), 7) for part in parts]
    best = [optimum(part.catalogue(), part.steps(), 7) for part in parts]
    assert slots.places(14).tolist() == [7, 7]
    assert 0 < whole.hits == sum(part.hits for part in alone) < whole.lookups
    assert whole.evictions == sum(part.evictions for part in alone)
    assert optimum(catalogue, trace.steps(), 14).hits == sum(part.hits for part in best)


def test_a_layer_that_does_not_fit_at_once_is_refused() -> None:
    trace = trace_of(4, k=3)

    with pytest.raises(BudgetTooSmall, match="picks 3, experts of 3 bytes"):
        replay(Lru(trace.catalogue()), trace.steps(), 2)


def test_a_policy_is_told_of_steps_and_layers_in_order() -> None:
    told: list[object] = []

    class Listening(Lru):
        def on_step_started(self, step: Step) -> None:
            told.append(("step", step.number, step.sequences.tolist()))

        def on_layer_entered(self, step: Step, layer: int) -> None:
            told.append(("entered", layer))

        def on_layer_routed(self, routing: LayerRouting) -> None:
            super().on_layer_routed(routing)
            told.append(("routed", routing.layer, routing.by_sequence().sum()))

        def on_layer_done(self, step: Step, layer: int) -> None:
            told.append(("done", layer))

    trace = trace_of(1, 1, layers=2, k=2)

    replay(Listening(trace.catalogue()), trace.steps(), 8)

    one_step = [("entered", 0), ("routed", 0, 2), ("done", 0), ("entered", 1), ("routed", 1, 2), ("done", 1)]
    assert told == [("step", 0, [0]), *one_step, ("step", 1, [1]), *one_step]


def distinct(trace: RoutingTrace) -> np.ndarray:
    """``[layers, experts]``: whether the expert is used at all."""
    used = np.zeros((trace.experts.shape[1], trace.num_experts), dtype=np.bool_)
    for layer in range(used.shape[0]):
        used[layer, np.unique(trace.experts[:, layer])] = True
    return used
