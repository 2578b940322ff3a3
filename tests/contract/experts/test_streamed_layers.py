"""A layer that passes what it misses through a few slots (DuoServe-MoE §5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.held_outputs import most_held
from greenroom.policies.base.events import Reason
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.replacement.next_use import NextUse
from tests.contract.experts.engines import Streaming, run_layer
from tests.unit.experts.fakes import FakeStore, GatedReads, manifest

EXPERTS, SLOTS = 12, 12
MANIFEST = manifest(layers=2, experts=EXPERTS)
PROMPT = np.arange(EXPERTS, dtype=np.int64).reshape(-1, 2)
"""Rows that need every expert of a layer."""


@contextmanager
def engine_of(policy: type[ExpertPolicy], reads: GatedReads | None = None) -> Iterator[ExpertEngine]:
    """All slots are taken: one by an expert of layer 0, the others by layer 1's, which have been used most."""
    catalogue = catalogue_of(MANIFEST)
    made = ExpertEngine(FakeStore(MANIFEST, reads), catalogue, policy(catalogue), EngineConfig(device_slots=SLOTS))
    try:
        made.preload([0, *range(EXPERTS, 2 * EXPERTS - 1)])
        rows = np.zeros(EXPERTS - 1, dtype=np.int64)
        for _ in range(20):
            with made.step(rows, rows == 0):
                run_layer(made, 1, np.arange(EXPERTS - 1, dtype=np.int64)[:, None])
        assert made.counters.on_demand_fetches == 0
        yield made
    finally:
        made.close()


def run_prompt(engine: ExpertEngine) -> int:
    """A prompt's step through layer 0. Returns how many of layer 1's experts are left."""
    rows = np.zeros(len(PROMPT), dtype=np.int64)
    with engine.step(rows, rows == 0):
        assert sorted(run_layer(engine, 0, PROMPT)) == list(range(EXPERTS))
        engine.audit(idle=True)
    return int(engine.device.resident[EXPERTS:].sum())


def test_it_leaves_the_other_layers_what_it_does_not_need() -> None:
    with engine_of(NextUse) as engine:
        assert run_prompt(engine) == 0
    with engine_of(Streaming) as engine:
        left = run_prompt(engine)
        assert left == SLOTS - 1 - engine._tiers.stream_slots[0]
        assert engine.counters.on_demand_fetches == EXPERTS - 1, "nothing is fetched twice"


def test_no_more_than_its_slots_are_on_their_way_or_wait_to_run() -> None:
    reads = GatedReads(*range(EXPERTS), experts=EXPERTS)
    with engine_of(Streaming) as engine:  # loaded before, since all later reads wait
        engine._tiers._disk._carrier._store._before_read = reads  # type: ignore[attr-defined]
        rows = np.zeros(len(PROMPT), dtype=np.int64)
        most = engine._tiers.stream_slots[0]
        with engine.step(rows, rows == 0), engine.routed(0, PROMPT) as landing:
            seen = []
            for expert, _ in landing:
                assert engine._tiers.moving <= most
                seen.append(expert)
                reads.let(*range(EXPERTS))
            assert sorted(seen) == list(range(EXPERTS))


def test_a_layer_that_misses_no_more_than_its_slots_is_not_asked() -> None:
    asked: list[int] = []

    class Asked(Streaming):
        def streams(self, routing: object, missing: object) -> bool:
            asked.append(1)
            return True

    with engine_of(Asked) as engine:
        rows, missing = np.zeros(1, dtype=np.int64), engine._tiers.stream_slots[0]
        with engine.step(rows, rows == 0):
            run_layer(engine, 0, np.arange(missing + 1, dtype=np.int64)[None])
        assert not asked
        with engine.step(rows, rows == 0):
            run_layer(engine, 0, np.arange(EXPERTS, dtype=np.int64)[None])
        assert asked


def test_what_has_landed_runs_before_residents_and_frees_its_slot() -> None:
    """Else the link would stand still while residents compute."""
    with engine_of(Streaming) as engine:
        rows = np.zeros(len(PROMPT), dtype=np.int64)
        order = []
        with engine.step(rows, rows == 0):
            picks = np.array([[0, 1], [2, 3], [4, 5]], dtype=np.int64)
            with engine.routed(0, picks) as landing:
                while not engine.device.resident[1:6].any():
                    assert engine._tiers.wait(20.0)
                    engine._on_demand.deliver()
                order = [expert for expert, _ in landing]
    assert order[0] != 0
    assert sorted(order) == list(range(6))


LONG = np.random.default_rng(3).random((1500, EXPERTS)).argsort(axis=1)[:, :4]
"""A prompt of many rows, each with four experts."""


def waiting_outputs(order: list[int], picks: NDArray[np.int64]) -> list[int]:
    """After each expert of this order: rows of outputs that wait, because one of a lower number has not run."""
    rows = np.bincount(picks.ravel(), minlength=EXPERTS)
    found = []
    for count in range(1, len(order) + 1):
        turn = min(order[count:], default=EXPERTS)
        found.append(int(sum(rows[expert] for expert in order[:count] if expert > turn)))
    return found


def test_few_outputs_of_a_prompt_wait_for_their_turn_where_layers_stream() -> None:
    """Residents run while the first two experts are on their way, until as many rows wait as the step has."""
    catalogue, reads = catalogue_of(MANIFEST), GatedReads(0, 1, experts=EXPERTS)
    engine = ExpertEngine(FakeStore(MANIFEST, reads), catalogue, Streaming(catalogue), EngineConfig(device_slots=SLOTS))
    try:
        engine.preload(range(2, EXPERTS))
        rows, order = np.zeros(len(LONG), dtype=np.int64), []
        with engine.step(rows, rows == 0), engine.routed(0, LONG) as landing:
            for expert, _ in landing:
                order.append(expert)
                if len(order) == 3:
                    reads.let(0, 1)
    finally:
        reads.let(0, 1)
        engine.close()
    assert order[0] == 2, "what is here does not wait"
    assert sorted(order) == list(range(EXPERTS))
    assert max(waiting_outputs(order, LONG)) <= most_held(len(LONG))


def test_prefetched_experts_that_fill_the_passage_wait_for_the_one_whose_turn_it_is() -> None:
    catalogue, later = catalogue_of(MANIFEST), range(4, EXPERTS)
    reads = GatedReads(*later, experts=EXPERTS)
    engine = ExpertEngine(FakeStore(MANIFEST, reads), catalogue, Streaming(catalogue), EngineConfig(device_slots=SLOTS))
    try:
        assert len(later) > engine._tiers.stream_slots[0] + 3, "so the layer may fetch nothing until some have run"
        for key in later:
            engine._tiers.fetch(key, Reason.PREFETCH)
        rows, order = np.zeros(len(LONG), dtype=np.int64), []
        with engine.step(rows, rows == 0), engine.routed(0, LONG) as landing:
            reads.let(*later)
            order = [expert for expert, _ in landing]
    finally:
        reads.let(*later)
        engine.close()
    assert sorted(order) == list(range(EXPERTS))
    assert max(waiting_outputs(order, LONG)) <= most_held(len(LONG)), "there are free slots"


@pytest.mark.parametrize("slots", range(4, 9))
def test_it_ends_where_residents_hold_all_slots(slots: int) -> None:
    """The first expert has no slot until a later one has run: that one runs, however many outputs wait then."""
    catalogue = catalogue_of(MANIFEST)
    engine = ExpertEngine(FakeStore(MANIFEST), catalogue, Streaming(catalogue), EngineConfig(device_slots=slots))
    try:
        engine.preload(range(EXPERTS - slots, EXPERTS))
        rows = np.zeros(len(LONG), dtype=np.int64)
        for _ in range(3):
            with engine.step(rows, rows == 0):
                order = run_layer(engine, 0, LONG)
                assert sorted(order) == list(range(EXPERTS))
                rows_of = np.bincount(LONG.ravel(), minlength=EXPERTS)
                assert max(waiting_outputs(order, LONG)) <= most_held(len(LONG)) + rows_of.max()
                engine.audit(idle=True)
    finally:
        engine.close()
