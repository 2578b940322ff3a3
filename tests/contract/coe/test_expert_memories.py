"""Memories of whole models, with bytes and without: one history, the same decisions, and what is held stays as it is.

A state machine plays any history to both at once, with two memories behind one link each: requests that wait, are given
up and computed; fetches; and reads that end, fail or bring other bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from greenroom.coe.dispatch.base import ExpertMemory
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.core.errors import PackDamaged, TransferFailed
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.model_memory import Landed, ModelMemory, catalogue_of_models
from greenroom.experts.pack.layout import DTYPES, PAGE_BYTES
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import LayerRouting, SequenceEnd, Step, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import PendingRequest
from greenroom.policies.registry import create_policy
from tests.contract.coe.model_store import DEADLINE_S, ModelStore, manifest_of, model_layer
from tests.contract.prepared_policies import EVERY_POLICY, prepared_policy
from tests.examples import examples

MEMORIES = 2
PAGE_OF = {name: PAGE_BYTES // dtype.itemsize for name, dtype in DTYPES.items()}
# A piece is a page here, so a tensor is some pages and a few elements, or only a few.
tensors = st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(sorted(DTYPES))).map(
    lambda drawn: ("t", (drawn[0] * PAGE_OF[drawn[2]] + drawn[1],), drawn[2])
)
models = st.lists(st.lists(tensors, min_size=1, max_size=5), min_size=3, max_size=7)
PREPARED: dict[str, Callable[[Catalogue, Dependencies], ExpertPolicy]] = {
    "coserve, with its graph": lambda catalogue, graph: create_policy(
        "coserve", catalogue=catalogue, options={"dependencies": graph}
    ),
    "coserve, literal": lambda catalogue, graph: create_policy(
        "coserve", catalogue=catalogue, options={"dependencies": graph, "literal": True}
    ),
    "pull, with its graph": lambda catalogue, graph: create_policy(
        "pull", catalogue=catalogue, options={"dependencies": graph}
    ),
}


class Overheard:
    """A policy, and all that it hears and answers."""

    def __init__(self, policy: ExpertPolicy) -> None:
        self.catalogue = policy.catalogue
        self.heard: list[tuple[str, list[object], object]] = []
        self._policy = policy

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._policy, name)

        def overhear(*said: object) -> object:
            answer = method(*said)
            self.heard.append((name, [plain(one) for one in said], plain(answer)))
            return answer

        return overhear


def plain(said: object) -> object:
    if isinstance(said, np.ndarray):
        return said.tolist()
    if isinstance(said, VictimRequest):
        return said.bytes_needed, plain(said.evictable), plain(said.resident), said.reason, plain(said.incoming)
    if isinstance(said, Step):
        return said.number, plain(said.row_sequences), plain(said.row_phases)
    if isinstance(said, LayerRouting):
        return said.layer, plain(said.experts), plain(said.rows), plain(said.step)
    if isinstance(said, Transfer):
        return said.expert, said.reason, said.error is None
    return said


class Histories(RuleBasedStateMachine):
    """``make(catalogue, dependencies)``: a new policy."""

    make: Callable[[Catalogue, Dependencies], ExpertPolicy]

    @initialize(models=models, spare=st.integers(0, 12), seed=st.integers(0, 9))
    def begin(self, models: list[list[Any]], spare: int, seed: int) -> None:
        manifest = manifest_of([model_layer(f"m{number}", own) for number, own in enumerate(models)])
        self.store = ModelStore(manifest)
        self.experts = len(models)
        catalogue = catalogue_of_models(manifest)
        random = np.random.default_rng(seed)
        before = [frozenset(np.flatnonzero(random.random(key) < 0.4).tolist()) for key in range(self.experts)]
        graph = Dependencies(random.random(self.experts), tuple(before))
        self.nbytes = int(catalogue.bytes_of.max()) + spare * PAGE_BYTES
        self.lost: set[int] = set()
        self.link = ModelLink(self.store, piece_bytes=PAGE_BYTES)
        self.simulated_link = SimulatedLink(lambda expert: 1.0, fails=self.lost.__contains__)
        self.real: list[ModelMemory] = []
        self.twins: list[SimulatedMemory] = []
        self.ears: list[tuple[Overheard, Overheard]] = []
        pieces = [record.pieces for record in self.link.records]
        for _ in range(MEMORIES):
            ears = Overheard(self.make(catalogue, graph)), Overheard(self.make(catalogue, graph))
            policies = [cast(ExpertPolicy, ear) for ear in ears]
            self.real.append(ModelMemory(self.link, policies[0], self.nbytes))
            self.twins.append(SimulatedMemory(policies[1], self.nbytes, self.simulated_link, pieces))
            self.ears.append(ears)
        self.held: list[Counter[int]] = [Counter() for _ in range(MEMORIES)]
        self.waiting: list[list[PendingRequest]] = [[] for _ in range(MEMORIES)]
        self.begun: list[tuple[int, int]] = []  # memory and expert, in order
        self.number = 0

    def both(self, memory: int) -> tuple[ExpertMemory, ExpertMemory]:
        return self.real[memory], self.twins[memory]

    @rule(memory=st.integers(0, MEMORIES - 1), expert=st.integers(0, 6), number=st.integers(1, 3))
    def wait(self, memory: int, expert: int, number: int) -> None:
        for _ in range(number):
            self.number += 1
            request = PendingRequest(f"r{self.number}", 0.0, 1, 1, 1, 9e9, expert=expert % self.experts)
            self.waiting[memory].append(request)
            for one in self.both(memory):
                one.waits(request)

    @precondition(lambda self: any(self.waiting))
    @rule(place=st.integers(0, 20), end=st.sampled_from([SequenceEnd.CANCELLED, SequenceEnd.FAILED]))
    def give_up(self, place: int, end: SequenceEnd) -> None:
        memory = next(number for number in range(MEMORIES) if self.waiting[number])
        request = self.waiting[memory].pop(place % len(self.waiting[memory]))
        for one in self.both(memory):
            one.forget(request, end)

    @rule(memory=st.integers(0, MEMORIES - 1), expert=st.integers(0, 6), whoever=st.booleans())
    def fetch(self, memory: int, expert: int, whoever: bool) -> None:
        expert %= self.experts
        real, twin = self.both(memory)
        here = real.has(expert) or (memory, expert) in self.begun
        residents, loading = real.residents.tolist(), real.loading
        begun = real.fetch(expert, whoever=whoever)
        assert twin.fetch(expert, whoever=whoever) == begun
        waited_for = {request.expert for request in self.waiting[memory]}
        if here:
            assert begun
            assert real.residents.tolist() == residents
        elif begun:
            self.begun.append((memory, expert))
            gone = set(residents) - set(real.residents.tolist())
            assert whoever or not gone & waited_for
        else:
            assert (real.residents.tolist(), real.loading) == (residents, loading), "nothing was begun, nobody left"
            kept = set() if whoever else waited_for & set(residents)
            assert self.held[memory] or kept or loading, "there was room"

    @precondition(lambda self: any(memory.residents.size for memory in self.real))
    @rule(place=st.integers(0, 20), most=st.integers(0, 3))
    def hold(self, place: int, most: int) -> None:
        there = [(number, key) for number, one in enumerate(self.real) for key in one.residents.tolist()]
        memory, expert = there[place % len(there)]
        requests = [request for request in self.waiting[memory] if request.expert == expert][:most]
        self.waiting[memory] = [request for request in self.waiting[memory] if request not in requests]
        self.held[memory][expert] += 1
        for one in self.both(memory):
            one.hold(expert, requests)

    @precondition(lambda self: any(self.held))
    @rule(place=st.integers(0, 20))
    def release(self, place: int) -> None:
        held = [(number, key) for number, own in enumerate(self.held) for key in own]
        memory, expert = held[place % len(held)]
        self.held[memory][expert] -= 1
        if not self.held[memory][expert]:
            del self.held[memory][expert]
        for one in self.both(memory):
            one.release(expert)

    @precondition(lambda self: self.begun)
    @rule(how=st.sampled_from(["whole", "whole", "whole", "broken", "altered"]))
    def end_a_read(self, how: str) -> None:
        memory, expert = self.begun.pop(0)
        self.store.broken = {expert} if how == "broken" else set()
        self.store.altered = {expert} if how == "altered" else set()
        self.lost.clear()
        if how != "whole":
            self.lost.add(expert)
        self.store.let()
        if how == "broken":
            self.store.let()  # it is tried twice
        assert self.link.wait(DEADLINE_S)
        landed = [self.real[number].collect() for number in range(MEMORIES)]
        assert landed[1 - memory] == []
        (one,) = landed[memory]
        assert one.expert == expert
        kind = {"whole": type(None), "broken": TransferFailed, "altered": PackDamaged}[how]
        assert type(one.error) is kind
        assert self.real[memory].has(expert) == (how == "whole")
        at = self.simulated_link.next_ms
        assert at is not None
        self.simulated_link.deliver(at)

    @rule(memory=st.integers(0, MEMORIES - 1), expert=st.integers(0, 6), whoever=st.booleans())
    def bring(self, memory: int, expert: int, whoever: bool) -> None:
        """Fetch it, and let all come that was begun."""
        self.fetch(memory=memory, expert=expert, whoever=whoever)
        while self.begun:
            self.end_a_read(how="whole")

    @invariant()
    def both_are_alike_and_whole(self) -> None:
        for real, twin, ears in zip(self.real, self.twins, self.ears, strict=True):
            real.audit()
            twin.audit()
            assert real.residents.tolist() == twin.residents.tolist()
            assert real.loading == twin.loading
            assert real.counters == twin.counters
            assert ears[0].heard == ears[1].heard

    @invariant()
    def what_is_held_is_there_as_it_was_stored(self) -> None:
        for memory, held in zip(self.real, self.held, strict=True):
            for expert in held:
                assert memory.has(expert)
                for got, stored in zip(memory.weights(expert), self.store.weights(expert), strict=True):
                    assert got.is_contiguous()
                    assert got.data_ptr() % 64 == 0 or not got.numel()
                    assert got.dtype == stored.dtype
                    assert torch.equal(got.view(torch.uint8), stored.view(torch.uint8))

    @invariant()
    def the_budget_is_kept(self) -> None:
        for number, memory in enumerate(self.real):
            inside = {*memory.residents.tolist(), *(key for own, key in self.begun if own == number)}
            assert sum(self.store.manifest.layers[key].layout.nbytes for key in inside) <= self.nbytes

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        self.store.broken, self.store.altered = set(), set()
        self.store.open()
        landed: list[Landed] = []
        while len(landed) < len(self.begun):
            assert self.link.wait(DEADLINE_S)
            for memory in self.real:
                landed += memory.collect()
        assert all(one.error is None for one in landed)
        assert sorted(one.expert for one in landed) == sorted(key for _, key in self.begun)
        for memory in self.real:
            memory.audit()
            assert not memory.loading
            memory.close()
        self.link.close()


def histories(policy: str) -> type[Histories]:
    class Own(Histories):
        make = staticmethod(PREPARED.get(policy) or (lambda catalogue, _: prepared_policy(policy, catalogue)))

    return Own


every_policy = pytest.mark.parametrize("policy", [*EVERY_POLICY, *sorted(PREPARED)])


@every_policy
def test_with_bytes_and_without_one_history_gives_the_same_decisions(policy: str) -> None:
    checks = settings(
        max_examples=examples(25),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(histories(policy), settings=checks)


@every_policy
def test_in_a_long_history_in_little_room_experts_come_and_leave(policy: str) -> None:
    """Hypothesis prefers short ones, in which few leave."""
    random = Random(0)
    machine = histories(policy)()
    described = [[("t", (random.choice([1, 2, 3]) * PAGE_BYTES,), "uint8") for _ in range(1 + n)] for n in range(7)]
    machine.begin(models=described, spare=8, seed=0)
    pick = random.randrange
    steps: list[tuple[int, Callable[[], object]]] = [
        (3, lambda: machine.bring(memory=pick(2), expert=pick(7), whoever=random.random() < 0.7)),
        (5, lambda: machine.fetch(memory=pick(2), expert=pick(7), whoever=random.random() < 0.7)),
        (4, lambda: machine.begun and machine.end_a_read(how=random.choice(["whole", "whole", "broken", "altered"]))),
        (4, lambda: machine.wait(memory=pick(2), expert=pick(7), number=1 + pick(2))),
        (1, lambda: any(machine.waiting) and machine.give_up(place=pick(20), end=SequenceEnd.CANCELLED)),
        (3, lambda: any(one.residents.size for one in machine.real) and machine.hold(place=pick(20), most=1 + pick(3))),
        (6, lambda: any(machine.held) and machine.release(place=pick(20))),
    ]
    weights, actions = zip(*steps, strict=True)
    for _ in range(1500):
        random.choices(actions, weights)[0]()
        machine.both_are_alike_and_whole()
        machine.what_is_held_is_there_as_it_was_stored()
        machine.the_budget_is_kept()
        for ears in machine.ears:
            for ear in ears:
                ear.heard.clear()
    counted = [memory.counters for memory in machine.real]
    machine.teardown()
    assert min(own.evictions for own in counted) > 40
    assert sum(own.failed_loads for own in counted) > 8


def use(memory: ExpertMemory, expert: int) -> None:
    request = PendingRequest("r", 0.0, 1, 1, 1, 9e9, expert=expert)
    memory.waits(request)
    memory.hold(expert, [request])
    memory.release(expert)


def waiting(expert: int) -> PendingRequest:
    return PendingRequest(f"waits for {expert}", 0.0, 1, 1, 1, 9e9, expert=expert)


def lru_memory(pages: list[int], room: int, first: list[int]) -> tuple[ModelMemory, ModelLink, ModelStore]:
    """Experts of so many pages; those that are there ``first`` lie in this order. Whole records."""
    store = ModelStore(
        manifest_of([model_layer(f"m{n}", [("t", (own * PAGE_BYTES,), "uint8")]) for n, own in enumerate(pages)])
    )
    store.open()
    link = ModelLink(store, piece_bytes=PAGE_BYTES)
    memory = ModelMemory(link, create_policy("lru", catalogue=catalogue_of_models(store.manifest)), room * PAGE_BYTES)
    assert memory.fill(first) == []
    return memory, link, store


def test_an_idle_expert_that_is_in_the_way_moves_with_its_bytes_and_a_held_one_does_not() -> None:
    memory, link, store = lru_memory([1, 1, 1, 2], 3, [0, 1, 2])
    memory.hold(1, [])
    before = memory.weights(1)[0].data_ptr()
    for expert in (0, 2):
        use(memory, expert)
    assert not memory.fetch(3), "two pages side by side are not to be had"
    assert memory.residents.tolist() == [0, 1, 2]
    memory.release(1)
    use(memory, 1)  # now it is the most recent one
    memory.waits(waiting(1))
    assert memory.fetch(3)
    assert memory.counters.bytes_moved == PAGE_BYTES
    memory.hold(1, [])
    (own,) = memory.weights(1)
    assert own.data_ptr() != before
    assert torch.equal(own, store.weights(1)[0])
    while not memory.has(3):
        assert memory.wait(DEADLINE_S)
        memory.collect()
    memory.hold(3, [])
    assert torch.equal(memory.weights(3)[0], store.weights(3)[0])
    memory.close()
    link.close()


def test_who_leaves_next_leaves_before_something_moves() -> None:
    """Experts 0 and 2 are the next ones, and 1 lies between them."""
    memory, link, _ = lru_memory([1, 1, 1, 2], 3, [0, 1, 2])
    for expert in (0, 2, 1):
        use(memory, expert)
    assert memory.fetch(3)
    assert memory.residents.tolist() in ([0], [2])
    assert memory.counters.bytes_moved == 0
    memory.close()
    link.close()


def test_one_more_leaves_rather_than_more_is_moved_than_is_loaded() -> None:
    """Holes of one page on either side of three that would have to move, and one is loaded that takes two."""
    memory, link, _ = lru_memory([1, 3, 1, 1, 2], 6, [0, 1, 2, 3])
    for expert in (0, 2, 1, 3):
        use(memory, expert)
    for expert in (1, 3):
        memory.waits(waiting(expert))
    memory.hold(3, [waiting(3)])
    assert memory.fetch(4)
    assert memory.counters.bytes_moved == 0
    assert memory.residents.tolist() == [3]
    assert memory.counters.evictions == 3
    memory.audit()
    memory.close()
    link.close()
