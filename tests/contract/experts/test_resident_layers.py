"""Layers whose picks are all on the device: where their experts lie, what the policy hears, and what is counted."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, Step, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Target
from greenroom.policies.base.fidelity import Fidelity
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.replacement.lru import Lru
from tests.examples import examples
from tests.unit.experts.fakes import FakeStore, manifest
from tests.unit.policies.model_profiles import model_profile, task_profile

LAYERS, EXPERTS, TOP_K = 3, 6, 2
MANIFEST = manifest(LAYERS, EXPERTS, TOP_K)
SIZE = LAYERS * EXPERTS
DEADLINE_S = 20.0


class Quiet(ExpertPolicy):
    """Wants what it is told to, and hears of nothing."""

    def want(self, wanted: Mask) -> None:
        self.target = Target(0 if self.target is None else self.target.generation + 1, wanted, drop_others=True)

    def victims(self, request: VictimRequest) -> Keys:
        wanted = np.zeros(SIZE) if self.target is None else self.target.wanted.astype(np.float64)
        return lowest(self.catalogue, request, wanted)


class Hears(Lru):
    """Keeps what it was told of layers."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.heard: list[tuple[Any, ...]] = []

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        self.heard.append(("routed", routing.layer, routing.experts.tolist(), routing.rows.tolist()))

    def on_experts_done(self, step: Step, layer: int, experts: Keys) -> None:
        self.heard.append(("done", layer, experts.tolist()))

    def on_layer_done(self, step: Step, layer: int) -> None:
        self.heard.append(("layer done", layer))


class Listens:
    """A listener that keeps picks, and what the policy reports."""

    def __init__(self) -> None:
        self.picks: list[tuple[int, list[list[int]]]] = []
        self.reports: list[tuple[int, dict[str, float]]] = []

    def sequence_queued(self, sequence: SequenceInfo) -> None: ...

    def sequence_preempted(self, sequence: int) -> None: ...

    def layer_routed(self, step: Step, layer: int, picks: np.ndarray[Any, Any]) -> None:
        self.picks.append((layer, picks.tolist()))

    def step_ended(self, step: Step, *, failed: bool) -> None: ...

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        self.reports.append((sequence, dict(report)))


def make(
    policy: type[ExpertPolicy],
    slots: int,
    fidelity: str = "paper",
    *,
    waits: bool = True,
    timeout_s: float = 20,
    before_read: Callable[[int, int], None] | None = None,
) -> tuple[Any, ExpertEngine, FakeStore]:
    store, catalogue = FakeStore(MANIFEST, before_read), catalogue_of(MANIFEST)
    made = policy(catalogue)
    config = EngineConfig(device_slots=slots, transfer_timeout_s=timeout_s, fidelity=Fidelity(fidelity, waits=waits))
    return made, ExpertEngine(store, catalogue, made, config), store


def change_target(policy: Quiet, engine: ExpertEngine) -> Mask:
    """Four of every layer are there; from now on two of them are wanted, and two others."""
    engine.preload([*range(4), *range(6, 10), *range(12, 16)])
    wanted = np.zeros(SIZE, dtype=np.bool_)
    wanted[[0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17]] = True
    policy.target = Target(1, wanted)
    return wanted


def run(engine: ExpertEngine, rows: int, picks_of: Any) -> list[bool]:
    """One step as compiled layers run it; ``picks_of(layer, allowed)`` is the router. Which were in one call."""
    at_once = []
    with engine.step(np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.bool_)):
        for layer in range(LAYERS):
            engine.layer_entered(layer)
            picks = np.asarray(picks_of(layer, engine.allowed_experts(layer)), dtype=np.int64)
            addresses = engine.resident_addresses(layer, picks)
            at_once.append(addresses is not None)
            if addresses is None:
                with engine.routed(layer, picks) as landing:
                    assert sorted(expert for expert, _ in landing) == np.unique(picks).tolist()
                continue
            check(engine, layer, picks, addresses)
            engine.layer_ran(layer, len(np.unique(picks)))
    return at_once


def check(engine: ExpertEngine, layer: int, picks: Any, addresses: Any) -> None:
    """Resident experts lie at their addresses, and the others have none."""
    resident = engine.device.resident[engine.catalogue.span(layer)]
    for expert in range(EXPERTS):
        if not resident[expert]:
            assert addresses[expert].tolist() == [0]
            continue
        floats = (ctypes.c_float * 32).from_address(int(addresses[expert, 0]))
        assert set(floats) == {100.0 * layer + expert}
    assert resident[np.unique(picks)].all()


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=10), min_size=1, max_size=6), st.integers(0, 2**31)
)
def test_tables_follow_experts_that_come_and_go(wants: list[set[int]], seed: int) -> None:
    policy, engine, _ = make(Quiet, 10)
    generator = random.Random(seed)

    def random_picks(layer: int, allowed: Mask | None) -> list[list[int]]:
        may = list(range(EXPERTS)) if allowed is None else np.flatnonzero(allowed[0]).tolist()
        return [generator.sample(may, TOP_K) for _ in range(2)]

    try:
        for want in wants:
            wanted = np.zeros(SIZE, dtype=np.bool_)
            wanted[list(want)] = True
            policy.want(wanted)
            for _ in range(3):
                run(engine, 2, random_picks)
                engine.audit(idle=True)
    finally:
        engine.close()


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_fetched_on_demand_while_a_layer_has_enough(closing: list[ExpertEngine], waits: bool) -> None:
    policy, engine, _ = make(Quiet, 9, waits=waits)
    closing.append(engine)
    engine.preload([*range(3), *range(6, 9), *range(12, 15)])
    listener = engine.listener = Listens()
    asked: list[Mask | None] = []

    def first(layer: int, allowed: Mask | None) -> list[list[int]]:
        asked.append(allowed)
        may = np.arange(EXPERTS) if allowed is None else np.flatnonzero(allowed[0])
        return [may[:TOP_K].tolist()]

    for _ in range(20):
        assert all(run(engine, 1, first))
    assert all(allowed is not None for allowed in asked)
    assert engine.counters.on_demand_fetches == 0
    wanted = np.zeros(SIZE, dtype=np.bool_)
    wanted[[3, 4, 5, 9, 10, 11, 15, 16, 17]] = True
    policy.want(wanted)  # others in all layers, and none of those that are here
    for _ in range(20):
        run(engine, 1, first)
    if waits:  # else a layer may be without for a while, and fetches what it picks
        assert engine.counters.on_demand_fetches == 0
        assert engine.resident_keys().tolist() == np.flatnonzero(wanted).tolist()
    assert [layer for layer, _ in listener.picks] == [0, 1, 2] * 40, "a listener hears of all layers, either way"
    assert engine.counters.lookups == 40 * LAYERS * TOP_K


def test_a_listener_hears_of_layers_whose_picks_are_all_resident(closing: list[ExpertEngine]) -> None:
    policy, engine, _ = make(Hears, SIZE, "exact")
    closing.append(engine)
    engine.preload(range(SIZE))
    assert run(engine, 1, lambda layer, allowed: [[0, 1]]) == [True] * LAYERS
    listener = engine.listener = Listens()
    assert run(engine, 2, lambda layer, allowed: [[0, 1], [2, 1]]) == [True] * LAYERS
    assert listener.picks == [(layer, [[0, 1], [2, 1]]) for layer in range(LAYERS)]
    assert not policy.heard
    assert engine.counters.hits == LAYERS * (2 + 3)


def test_a_layer_waits_for_its_own_part_of_a_target_and_for_no_other(closing: list[ExpertEngine]) -> None:
    policy, engine, store = make(Quiet, 12)
    closing.append(engine)
    change_target(policy, engine)
    allowed: list[list[int]] = []

    def seen(layer: int, mask: Mask | None) -> list[list[int]]:
        assert mask is not None
        allowed.append(np.flatnonzero(mask[0]).tolist())
        return [[0, 1]]

    assert all(run(engine, 1, seen))
    assert all({0, 1, 4, 5} <= set(there) for there in allowed), "from the first step on"
    assert engine.counters.on_demand_fetches == 0
    assert sum(store.reads.values()) == 12 + 6


def test_a_layer_does_not_wait_for_another_layers_experts(closing: list[ExpertEngine]) -> None:
    released = threading.Event()

    def late(layer: int, expert: int) -> None:
        if (layer, expert) == (2, 4):
            assert released.wait(DEADLINE_S)

    policy, engine, _ = make(Quiet, 12, before_read=late)
    closing.append(engine)
    wanted = change_target(policy, engine)

    def release(layer: int, mask: Mask | None) -> list[list[int]]:
        if layer == 1:  # reached though the third layer's expert is held back
            released.set()
        return [[0, 1]]

    assert all(run(engine, 1, release))
    assert engine.device.resident[wanted].all()


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
def test_what_can_not_be_had_is_not_waited_for_again(closing: list[ExpertEngine], hangs: bool) -> None:
    ended = threading.Event()

    def broken(layer: int, expert: int) -> None:
        if (layer, expert) == (0, 4):
            if hangs:
                ended.wait(DEADLINE_S)
            raise OSError("a bad sector")

    policy, engine, _ = make(Quiet, 12, timeout_s=0.3, before_read=broken)
    closing.append(engine)
    engine.preload([*range(4), *range(6, 10), *range(12, 16)])
    wanted = np.zeros(SIZE, dtype=np.bool_)
    wanted[[0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15]] = True
    policy.target = Target(1, wanted)
    began = time.monotonic()
    try:
        for _ in range(20):
            run(engine, 1, lambda layer, allowed: [[0, 1]])
    finally:
        ended.set()
    assert time.monotonic() - began < 20 * LAYERS * 0.3 / 2, "once, not in every layer of every step"


def test_a_target_that_has_no_room_is_not_waited_for(closing: list[ExpertEngine]) -> None:
    policy, engine, _ = make(Quiet, 6)
    closing.append(engine)
    engine.preload([0, 1, 6, 7, 12, 13])
    policy.target = Target(1, np.ones(SIZE, dtype=np.bool_))  # three times as many as fit, and no other expert to evict
    assert all(run(engine, 1, lambda layer, allowed: [[0, 1]]))
    assert engine.resident_keys().tolist() == [0, 1, 6, 7, 12, 13]


def test_a_target_that_changes_moves_experts_and_no_layer_waits(closing: list[ExpertEngine]) -> None:
    policy, engine, store = make(Quiet, 12, waits=False)
    closing.append(engine)
    wanted = change_target(policy, engine)
    before = engine.counters.stall_seconds
    deadline = time.monotonic() + DEADLINE_S
    while not engine.device.resident[wanted].all():
        assert time.monotonic() < deadline
        assert all(run(engine, 1, lambda layer, allowed: [[0, 1]]))
    assert (engine.counters.on_demand_fetches, engine.counters.stall_seconds) == (0, before)
    assert engine.counters.prefetches == 6
    run(engine, 1, lambda layer, allowed: [[4, 5]])
    assert engine.counters.prefetches_used == 6
    assert sum(store.reads.values()) == 12 + 6


@pytest.mark.parametrize("fidelity", ["exact", "paper"])
def test_a_policy_hears_the_same_of_a_layer_in_one_call(closing: list[ExpertEngine], fidelity: str) -> None:
    """Of the same picks, with experts handed out one by one and at once."""
    steps = [[[[1, 0]], [[0, 1], [1, 2]], [[2, 0], [2, 1], [0, 2]]] for _ in range(2)]
    heard = []
    for at_once in (False, True):
        policy, engine, _ = make(Hears, 9, fidelity)
        closing.append(engine)
        engine.preload([*range(3), *range(6, 9), *range(12, 15)])
        for layers in steps:
            with engine.step(np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.bool_)):
                for layer, picked in enumerate(layers):
                    picks = np.array(picked)
                    engine.layer_entered(layer)
                    engine.allowed_experts(layer)
                    addresses = engine.resident_addresses(layer, picks) if at_once else None
                    assert (addresses is not None) == (at_once and fidelity == "paper")
                    if addresses is not None:
                        engine.layer_ran(layer, len(np.unique(picks)))
                        continue
                    with engine.routed(layer, picks) as landing:
                        list(landing)
        heard.append((policy.heard, engine.counters.lookups, engine.counters.hits))
    assert heard[0] == heard[1]
    assert len(heard[0][0]) == len(steps) * LAYERS * 3


def test_a_layer_with_a_missing_expert_takes_the_slow_path(closing: list[ExpertEngine]) -> None:
    _, engine, _ = make(Quiet, 6, "exact")
    closing.append(engine)
    engine.preload([0, 1, 6, 7, 12, 13])
    assert run(engine, 1, lambda layer, allowed: [[0, 1]]) == [True] * 3
    assert run(engine, 1, lambda layer, allowed: [[0, 1 + (layer == 1)]]) == [True, False, True]
    assert engine.counters.on_demand_fetches == 1


def test_rows_that_got_other_experts_count_for_their_sequences(closing: list[ExpertEngine]) -> None:
    _, engine, _ = make(Quiet, 9)
    closing.append(engine)
    for sequence in (3, 5):
        engine.sequence_queued(SequenceInfo(sequence, "task"))
    rows = np.array([3, 5, 3])
    with engine.step(rows, rows == 0):
        engine.rerouted(0, np.array([True, False, False]))
        engine.rerouted(2, np.array([True, False, True]))
    with contextlib.suppress(ZeroDivisionError), engine.step(rows, rows == 0):
        engine.rerouted(0, np.array([True, True, True]))
        raise ZeroDivisionError
    with engine.step(rows[:2], rows[:2] == 0):
        pass
    assert engine.approximated(3, 3) == pytest.approx(3 / (3 * LAYERS)), "a step that failed runs again"
    assert engine.approximated(5, 2) == 0
    assert engine.approximated(9, 0) == 0
    engine.sequence_ended(3, SequenceEnd.FINISHED)
    assert engine.approximated(3, 3) == 0


class Reports(Quiet):
    """Has something to say of sequences with an odd number."""

    def report(self, sequence: int) -> Mapping[str, float]:
        return {"recall": sequence / 10} if sequence % 2 else {}


def test_what_the_policy_says_of_a_sequence_is_told_once_at_its_end(closing: list[ExpertEngine]) -> None:
    for policy in (Reports, Quiet):
        _, engine, _ = make(policy, 9)
        closing.append(engine)
        engine.sequence_ended(1, SequenceEnd.FINISHED)  # there is no listener
        heard = engine.listener = Listens()
        for sequence in (3, 4, 5):
            engine.sequence_queued(SequenceInfo(sequence, "task"))
        assert heard.reports == []
        for sequence in (3, 4):
            engine.sequence_ended(sequence, SequenceEnd.FINISHED)
        assert heard.reports == ([(3, {"recall": 0.3})] if policy is Reports else [])


def test_sensitive_rows_are_confined_where_their_task_does_not_mind() -> None:
    profile = model_profile({"easy": task_profile([[1.0] * EXPERTS] * LAYERS, insensitive=2)}, top_k=TOP_K)
    catalogue = catalogue_of(MANIFEST)
    config = EngineConfig(device_slots=9, fidelity=Fidelity("sensitive", profile))
    engine = ExpertEngine(FakeStore(MANIFEST), catalogue, Quiet(catalogue), config)
    try:
        engine.preload([*range(3), *range(6, 9), *range(12, 15)])
        engine.sequence_queued(SequenceInfo(0, "easy"))
        engine.sequence_queued(SequenceInfo(1, "hard"))
        masks: list[Mask | None] = []
        for sequences, confined in (([0], [True, True, False]), ([1], [False] * 3), ([0, 1], [True, True, False])):
            rows = np.array(sequences)
            with engine.step(rows, rows < 0):
                masks = [engine.allowed_experts(layer) for layer in range(LAYERS)]
            assert [mask is not None for mask in masks] == confined
        assert masks[0] is not None
        assert masks[0].sum(axis=1).tolist() == [3, EXPERTS]
    finally:
        engine.close()
