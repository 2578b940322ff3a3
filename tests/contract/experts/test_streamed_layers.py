"""A layer that passes what it misses through a few slots (DuoServe-MoE §5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
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
        assert left == SLOTS - 1 - engine._tiers.stream_slots
        assert engine.counters.on_demand_fetches == EXPERTS - 1, "nothing is fetched twice"


def test_no_more_than_its_slots_are_on_their_way_or_wait_to_run() -> None:
    reads = GatedReads(*range(EXPERTS), experts=EXPERTS)
    with engine_of(Streaming) as engine:  # loaded before, since all later reads wait
        engine._tiers._disk._carrier._store._before_read = reads  # type: ignore[attr-defined]
        rows = np.zeros(len(PROMPT), dtype=np.int64)
        most = engine._tiers.stream_slots
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
        rows, missing = np.zeros(1, dtype=np.int64), engine._tiers.stream_slots
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
