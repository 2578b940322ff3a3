"""One suite for all expert policies: whatever happens to a pool, in whatever order.

A small ledger stands in for the engine. It plays random histories (layers, fetches ahead, failures, shrinking
budgets, late and strange predictions, evictions unasked) and holds each answer against the interface's contract.
Everything that a policy is given is read-only, so a policy that writes to its input fails at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import (
    Artifact,
    LayerRouting,
    Phase,
    Prediction,
    PredictionRequest,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch, Target
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.policies.foresight.path_weights import PATH
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from greenroom.policies.replacement.lru import Lru
from tests.contract.prepared_policies import path_arrays
from tests.examples import examples
from tests.matrices import matrix
from tests.unit.policies.bench import keys_of, mask_of

CATALOGUES = {
    "alike": Catalogue.uniform("pool", layers=3, experts=6, top_k=2, expert_bytes=10),
    "layers of different sizes": Catalogue(
        "pool", experts_per_layer=[4, 8, 1], top_k=[2, 3, 1], expert_bytes=[10, 25, 7]
    ),
    "whole models": Catalogue.of_models("graph", [40, 10, 25, 25, 5, 60, 10, 1]),
}
TIERS = (Tier.DEVICE, Tier.HOST)

Operation = tuple[str, int, int, int]
"""A word of OPERATIONS and small numbers that it is free to read as it likes, so that any list is a history."""


class World:
    """Which expert is where, what room there is, and what the policy has answered so far."""

    def __init__(self, policy: ExpertPolicy, *, noise: bool = False) -> None:
        self.policy = policy
        self.catalogue = policy.catalogue
        self.noise = noise
        self.inside: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        whole = int(self.catalogue.bytes_of.sum())
        self.budget = {Tier.DEVICE: whole // 2, Tier.HOST: whole // 2}
        self.pinned: set[int] = set()
        self.running: set[int] = set()
        self.steps = 0
        self.step = Step(self.catalogue.pool, 0, keys_of([]), np.empty(0, dtype=np.uint8))
        self.answers: list[list[int]] = []
        self.demands = 0
        self.refusals = 0
        self._wants = Wants()
        for tier in TIERS:
            policy.on_budget_changed(tier, self.budget[tier])

    # -- what happens ------------------------------------------------------------------------------------------

    def play(self, history: list[Operation]) -> None:
        for word, a, b, c in history:
            OPERATIONS[word](self, a, b, c)
            self._wants.check(self.policy)
            if self.noise:
                self._unrelated_events()

    def new_step(self, a: int, b: int, c: int) -> None:
        self.steps += 1
        rows = keys_of(sorted({a % 4, b % 4, c % 4}))
        phases = np.full(len(rows), c % 2, dtype=np.uint8)
        self.step = Step(self.catalogue.pool, self.steps, rows, phases, row_paths=self._paths(len(rows), a, b))
        if a % 2:
            planned = keys_of(sorted({b % 4, 4 + c % 4}))
            phases = np.full(len(planned), b % 2, dtype=np.uint8)
            tokens = np.full(len(planned), a, dtype=np.int64) if c % 2 else None
            paths = self._paths(len(planned), b, a)
            self.policy.on_step_planned(Step(self.catalogue.pool, self.steps + 1, planned, phases, tokens, paths))
        self.policy.on_step_started(self.step)
        for predictor in self.policy.predictors:
            predictor.on_step_started(self.step)

    def _paths(self, rows: int, a: int, b: int) -> np.ndarray | None:
        """Of three steps one has none, and one a chance that is no number."""
        if a % 3 == 0:
            return None
        paths = np.random.default_rng((a, b)).random((rows, self.catalogue.size), dtype=np.float32) ** 3
        if a % 3 == 1:
            paths[0, b % self.catalogue.size] = np.nan
        paths.setflags(write=False)
        return paths

    def layer(self, a: int, b: int, c: int) -> None:
        """A whole layer: entered, routed, its misses fetched, computed, done."""
        layer = a % self.catalogue.layers
        experts = int(self.catalogue.experts_per_layer[layer])
        picks = np.random.default_rng(b).integers(0, experts + 1, (len(self.step.row_sequences), 1 + c % 2))
        picks.setflags(write=False)
        routing = LayerRouting.from_picks(self.catalogue, self.step, layer, picks)
        group = set(routing.experts.tolist())
        resident = self._mask(self.inside[Tier.DEVICE])

        self.policy.on_layer_entered(self.step, layer)
        check_row_mask(self.policy.row_mask(self.step, layer, resident), self.step, self.catalogue, layer)
        self.policy.on_layer_routed(routing)
        check_order(self.policy.compute_order(routing, resident), routing)
        self.pinned |= group
        missing = sorted(group - self.inside[Tier.DEVICE])
        if self.policy.streams(routing, keys_of(missing)):
            self._pass_through(missing, group)
        elif self._room_for(missing, Tier.DEVICE, Reason.ON_DEMAND):
            for expert in missing:
                self._arrive(expert, Tier.DEVICE, Reason.ON_DEMAND)
        for predictor in self.policy.predictors:
            predictor.on_layer_routed(routing)
        if c % 3:
            self._answer(b)
        self.fetch_ahead(b, c, a)
        self.pinned -= group
        self.policy.on_experts_done(self.step, layer, routing.experts)
        self.policy.on_layer_done(self.step, layer)

    def _pass_through(self, missing: list[int], group: set[int]) -> None:
        """One after the other, each at the cost of any that does not run or has run."""
        self.pinned -= group - set(missing)
        for expert in missing:
            if self._room_for([expert], Tier.DEVICE, Reason.ON_DEMAND):
                self._arrive(expert, Tier.DEVICE, Reason.ON_DEMAND)
            self.pinned.discard(expert)

    def fetch_ahead(self, a: int, b: int, c: int) -> None:
        expert = a % self.catalogue.size
        tier, reason = TIERS[b % 2], (Reason.PREFETCH, Reason.TARGET)[c % 2]
        if expert not in self.inside[tier] and self._room_for([expert], tier, reason):
            self._arrive(expert, tier, reason)

    def fail(self, a: int, b: int, c: int) -> None:
        """A transfer fails after room was made for it: the room stays free, the expert stays away."""
        expert, tier = a % self.catalogue.size, TIERS[b % 2]
        reason = (Reason.ON_DEMAND, Reason.PREFETCH)[c % 2]
        if expert not in self.inside[tier] and self._room_for([expert], tier, reason):
            self.policy.on_transfer_failed(Transfer(expert, Tier.DISK, tier, reason, "read error"))

    def evict_unasked(self, a: int, b: int, c: int) -> None:
        tier = TIERS[b % 2]
        gone = sorted(self.inside[tier] - self.pinned)[: c % 3]
        self._evict(gone, tier)

    def change_budget(self, a: int, b: int, c: int) -> None:
        tier = TIERS[b % 2]
        self.budget[tier] = int(self.catalogue.bytes_of.sum()) * (1 + a % 10) // 10
        self.policy.on_budget_changed(tier, self.budget[tier])
        self._room_for([], tier, Reason.BUDGET)

    def sequences(self, a: int, b: int, c: int) -> None:
        task, expert = "classify" if b % 2 else "unknown", a % self.catalogue.size
        sequence = SequenceInfo(self.steps * 100 + a, task, b, c, expert)
        if sequence.sequence not in self.running:
            self.policy.on_sequence_queued(sequence)
            self.running.add(sequence.sequence)
            if c % 3:
                self.policy.on_sequence_started(sequence)
        elif self.running:
            ended = min(self.running)
            self.running.discard(ended)
            self.policy.on_sequence_ended(ended, list(SequenceEnd)[c % 3])
            assert isinstance(self.policy.report(ended), Mapping)

    def predict(self, a: int, b: int, c: int) -> None:
        """What was asked for, if anything was, an answer too late for a step long over, and a forecast for a task."""
        for request in self.policy.take_requests():
            self._tell(request, b)
        late = PredictionRequest("router", (a % self.catalogue.layers, self.catalogue.layers), step=self.steps - c)
        self.policy.on_prediction(self._prediction(late, b))
        task = ("classify", "unknown", "compare")[a % 3]
        forecast = PredictionRequest(POPULARITY, (0, self.catalogue.layers), task=task)
        self.policy.on_prediction(self._prediction(forecast, c))

    def swap(self, a: int, b: int, c: int) -> None:
        self.policy.on_artifact_swapped(
            Artifact("popularity", str(a), {"weights": self._weights(self.catalogue.size, b)})
        )
        members = self._weights((1 + b % 3, self.catalogue.size + (c % 4 == 0)), c)  # now and then of another pool
        self.policy.on_artifact_swapped(Artifact(EAMC, str(b), {MATRICES: members}))
        own = self.catalogue if c % 4 else CATALOGUES["alike"]
        self.policy.on_artifact_swapped(Artifact(PATH, str(a), path_arrays(own, window=1 + b % 3, seed=c)))

    # -- what is asked -----------------------------------------------------------------------------------------

    def _room_for(self, incoming: list[int], tier: Tier, reason: Reason) -> bool:
        bytes_of = self.catalogue.bytes_of
        held = int(bytes_of[sorted(self.inside[tier])].sum()) if self.inside[tier] else 0
        needed = held + int(bytes_of[incoming].sum()) - self.budget[tier] if incoming else held - self.budget[tier]
        if needed <= 0:
            return True
        request = VictimRequest(
            tier,
            needed,
            self._mask(self.inside[tier] - self.pinned),
            self._mask(self.inside[tier]),
            reason,
            keys_of(incoming),
        )
        victims = self.policy.victims(request)
        check_victims(victims, request, self.catalogue)
        assert self.policy.victims(request).tolist() == victims.tolist(), "asking must change nothing"
        self.answers.append(victims.tolist())
        self._evict(victims.tolist(), tier)
        if reason in (Reason.ON_DEMAND, Reason.BUDGET):
            self.demands += 1
            self.refusals += not len(victims)
        return len(victims) > 0

    def _arrive(self, expert: int, tier: Tier, reason: Reason) -> None:
        self.inside[tier].add(expert)
        self.policy.on_transfer_done(Transfer(expert, Tier.DISK, tier, reason))

    def _evict(self, experts: list[int], tier: Tier) -> None:
        self.inside[tier] -= set(experts)
        self.policy.on_evicted(tier, keys_of(experts))

    def _unrelated_events(self) -> None:
        """Things that say nothing of this pool's experts."""
        unknown = SequenceInfo(10**9)
        self.policy.on_sequence_queued(unknown)
        self.policy.on_sequence_ended(unknown.sequence, SequenceEnd.CANCELLED)
        self.policy.on_evicted(Tier.DEVICE, keys_of([]))
        self.policy.on_experts_done(self.step, 0, keys_of([]))
        self.policy.on_artifact_swapped(Artifact("of another policy", "1", {}))
        self.policy.on_prediction(self._prediction(PredictionRequest("of another policy", (0, 1)), 1))
        for tier in TIERS:
            self.policy.on_budget_changed(tier, self.budget[tier])

    def _answer(self, seed: int) -> None:
        """What providers within the step answer: a row of weights for each row of the step, then once more."""
        for request in self.policy.take_requests():
            assert request.kind in self.policy.asks
            self._tell(request, seed, rows=self.step.rows)

    def _tell(self, request: PredictionRequest, seed: int, **shape: int) -> None:
        """The answer of the policy's own predictor, if it has one for this kind, or any, twice."""
        for predictor in self.policy.predictors:
            if predictor.kind == request.kind:
                found = predictor.answer(request)
                break
        else:
            found = self._prediction(request, seed, **shape)
        if found is not None:
            self.policy.on_prediction(found)
            self.policy.on_prediction(found)

    def _prediction(self, request: PredictionRequest, seed: int, *, rows: int | None = None) -> Prediction:
        start, stop = (int(self.catalogue.first[layer]) for layer in request.layers)
        shape = (stop - start,) if rows is None else (rows, stop - start)
        return Prediction(request, "v1", self._weights(shape, seed))

    def _weights(self, shape: int | tuple[int, ...], seed: int) -> NDArray[np.float32]:
        weights = np.random.default_rng(seed).random(shape, dtype=np.float32)
        weights.setflags(write=False)
        return weights

    def _mask(self, experts: set[int]) -> Mask:
        return mask_of(self.catalogue, experts)


OPERATIONS: dict[str, Callable[[World, int, int, int], None]] = {
    "step": World.new_step,
    "layer": World.layer,
    "fetch ahead": World.fetch_ahead,
    "fail": World.fail,
    "evict": World.evict_unasked,
    "budget": World.change_budget,
    "sequences": World.sequences,
    "predict": World.predict,
    "swap": World.swap,
}


@dataclass
class Wants:
    """Holds that published wants have the right form, never change, and rise in generation."""

    seen: dict[str, Prefetch | Target] = field(default_factory=dict)
    copies: dict[str, object] = field(default_factory=dict)

    def check(self, policy: ExpertPolicy) -> None:
        size = policy.catalogue.size
        if policy.prefetch is not None:
            assert policy.prefetch.priority.shape == (size,)
            assert policy.prefetch.priority.dtype == np.float32
            assert policy.prefetch.may_evict is None or policy.prefetch.may_evict.shape == (size,)
            self._follow("prefetch", policy.prefetch, policy.prefetch.priority)
        if policy.target is not None:
            assert policy.target.wanted.shape == (size,)
            assert policy.target.wanted.dtype == np.bool_
            self._follow("target", policy.target, policy.target.wanted)

    def _follow(self, name: str, want: Prefetch | Target, array: np.ndarray) -> None:
        before = self.seen.get(name)
        if before is want:
            assert np.array_equal(array, np.asarray(self.copies[name])), "a published want must not change"
            return
        assert before is None or want.generation > before.generation
        self.seen[name], self.copies[name] = want, array.copy()


def check_victims(victims: Keys, request: VictimRequest, catalogue: Catalogue) -> None:
    assert victims.dtype == np.int64
    assert victims.ndim == 1
    assert len(set(victims.tolist())) == len(victims), "a victim twice"
    assert request.evictable[victims].all(), "a victim that may not go"
    if len(victims) == 0:
        available = int(catalogue.bytes_of[request.evictable].sum())
        ahead = request.reason in (Reason.PREFETCH, Reason.TARGET)
        assert ahead or available < request.bytes_needed, "refused what must be had though there were enough"
        return
    freed = int(catalogue.bytes_of[victims].sum())
    assert freed >= request.bytes_needed, "not enough"
    assert freed - int(catalogue.bytes_of[victims].min()) < request.bytes_needed, "a victim without need"


def check_order(order: Keys | None, routing: LayerRouting) -> None:
    assert order is None or sorted(order.tolist()) == sorted(routing.experts.tolist())


def check_row_mask(mask: Mask | None, step: Step, catalogue: Catalogue, layer: int) -> None:
    if mask is not None:
        assert mask.shape == (step.rows, int(catalogue.experts_per_layer[layer]))
        assert (mask.sum(axis=1) >= int(catalogue.top_k[layer])).all()


numbers = st.integers(0, 40)
# Layers are most of what happens to a pool, so they are most of a history too.
words = st.one_of(st.just("layer"), st.just("layer"), st.sampled_from(sorted(OPERATIONS)))
histories = st.lists(st.tuples(words, numbers, numbers, numbers), max_size=60).map(
    lambda history: [("step", 0, 1, 2), *history]
)
DEPENDENCIES = Dependencies(
    np.linspace(0.9, 0.1, 8), tuple(map(frozenset, [[], [], [0], [0, 1], [2], [2, 3], [], [6]]))
)  # fmt: skip
WITH_OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "coserve, literal": ("coserve", {"literal": True}),
    "pull, counting": ("pull", {}),
    "decayed, host": ("decayed", {"host": True}),
    "next-use, host": ("next-use", {"host": True}),
    "duoserve, literal": ("duoserve", {"literal": True}),
    "emoe, paper": ("emoe", {"fidelity": "paper"}),
    "moe-infinity, literal": ("moe-infinity", {"literal": True}),
    "static, random": ("static", {"share": 0.4, "seed": 3}),
}
every_policy = pytest.mark.parametrize("name", sorted([*EXPERT_POLICIES, *WITH_OPTIONS]))
every_catalogue = pytest.mark.parametrize("shape", sorted(CATALOGUES))
some_catalogue = matrix(1, shape=sorted(CATALOGUES), name=sorted([*EXPERT_POLICIES, *WITH_OPTIONS]))
"""Of each policy one."""
often = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def policy_of(name: str, shape: str) -> ExpertPolicy:
    policy, options = WITH_OPTIONS.get(name, (name, {}))
    if policy in ("coserve", "pull") and shape == "whole models" and name != "pull, counting":
        options = {**options, "dependencies": DEPENDENCIES}
    return create_policy(policy, catalogue=CATALOGUES[shape], options=options)


def world(name: str, shape: str, *, noise: bool = False) -> World:
    return World(policy_of(name, shape), noise=noise)


@every_policy
@every_catalogue
@often
@given(history=histories)
def test_every_answer_keeps_the_contract_and_equal_histories_get_equal_answers(
    name: str, shape: str, history: list[Operation]
) -> None:
    first, second = world(name, shape), world(name, shape)

    first.play(history)
    second.play(history)

    assert first.answers == second.answers
    assert first.inside == second.inside


@some_catalogue
@often
@given(history=histories)
def test_events_of_no_concern_change_no_answer(name: str, shape: str, history: list[Operation]) -> None:
    quiet, noisy = world(name, shape), world(name, shape, noise=True)

    quiet.play(history)
    noisy.play(history)

    assert quiet.answers == noisy.answers


@every_policy
@often
@given(history=histories, count=st.integers(1, 8))
def test_asking_once_for_many_is_asking_many_times_for_one(name: str, history: list[Operation], count: int) -> None:
    played = world(name, "alike")
    played.play(history)
    catalogue, inside = played.catalogue, set(played.inside[Tier.DEVICE])
    one_by_one = copy.deepcopy(played.policy)

    def ask(policy: ExpertPolicy, slots: int) -> list[int]:
        evictable = mask_of(catalogue, inside)
        return [*map(int, policy.victims(VictimRequest(Tier.DEVICE, slots * 10, evictable, evictable)))]

    together = ask(played.policy, count)
    singly: list[int] = []
    if count <= len(inside):
        for _ in range(count):
            (victim,) = ask(one_by_one, 1)
            inside.discard(victim)
            one_by_one.on_evicted(Tier.DEVICE, keys_of([victim]))
            singly.append(victim)

    assert together == singly


def long_history() -> list[Operation]:
    random = np.random.default_rng(1)
    history: list[Operation] = [("step", 0, 1, 2)]
    for _ in range(1000):
        word = "layer" if random.random() < 0.5 else sorted(OPERATIONS)[int(random.integers(len(OPERATIONS)))]
        a, b, c = random.integers(0, 40, 3).tolist()
        history.append((word, a, b, c))
    return history


@some_catalogue
def test_a_long_history_evicts_many_and_seldom_runs_out_of_candidates(name: str, shape: str) -> None:
    """Guards the suite itself: with these shapes and budgets its checks are reached."""
    played = world(name, shape)

    played.play(long_history())

    assert sum(len(answer) for answer in played.answers) > 20
    assert len({expert for answer in played.answers for expert in answer}) > 3
    assert played.refusals < played.demands / 2


class Greedy(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        return np.flatnonzero(request.evictable)


class Stingy(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        return super().victims(request)[:-1]


class Ruthless(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        all_resident = VictimRequest(request.tier, request.bytes_needed, request.resident, request.resident)
        return super().victims(all_resident)


class Stuttering(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        victims = super().victims(request)
        return np.concatenate((victims, victims[:1]))


class Moody(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        self._recency.last[:] = np.roll(self._recency.last, 1)
        return super().victims(request)


class Scribbling(Lru):
    def victims(self, request: VictimRequest) -> Keys:
        request.evictable[0] = False
        return super().victims(request)


class Fickle(Lru):
    """Writes to priorities that it has published already."""

    def on_step_started(self, step: Step) -> None:
        if self.prefetch is None:
            self.prefetch = Prefetch(1, np.zeros(self.catalogue.size, dtype=np.float32))
        self.prefetch.priority[:] += 1


class Backdating(Lru):
    def on_step_started(self, step: Step) -> None:
        self.target = Target(-step.number, np.zeros(self.catalogue.size, dtype=np.bool_))


class Jumbling(Lru):
    def compute_order(self, routing: LayerRouting, resident: Mask) -> Keys | None:
        return routing.experts[1:]


class Starving(Lru):
    def row_mask(self, step: Step, layer: int, resident: Mask) -> Mask | None:
        return np.zeros((step.rows, int(self.catalogue.experts_per_layer[layer])), dtype=np.bool_)


@pytest.mark.parametrize(
    "broken",
    [Greedy, Stingy, Ruthless, Stuttering, Moody, Scribbling, Fickle, Backdating, Jumbling, Starving],
)
def test_a_policy_that_breaks_the_contract_is_caught(broken: type[ExpertPolicy]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        World(broken(CATALOGUES["alike"])).play(long_history())


@every_policy
@pytest.mark.parametrize("reason", [Reason.ON_DEMAND, Reason.BUDGET])
def test_what_must_be_had_is_refused_only_for_want_of_candidates(name: str, reason: Reason) -> None:
    policy = policy_of(name, "alike")
    evictable = mask_of(policy.catalogue, [1, 2])

    def victims(bytes_needed: int) -> list[int]:
        request = VictimRequest(Tier.DEVICE, bytes_needed, evictable, evictable, reason)
        return [*map(int, policy.victims(request))]

    assert victims(21) == []
    assert sorted(victims(20)) == [1, 2]
    assert len(victims(1)) == 1
    assert victims(0) == []


@every_policy
def test_an_expert_never_heard_of_can_be_a_victim(name: str) -> None:
    """What was resident before the policy came to be (a warm start) is unknown to it."""
    policy = policy_of(name, "alike")
    every = mask_of(policy.catalogue, range(policy.catalogue.size))

    for tier in TIERS:
        victims = policy.victims(VictimRequest(tier, 30, every, every))
        check_victims(victims, VictimRequest(tier, 30, every, every), policy.catalogue)
        assert len(victims) == 3


@every_policy
def test_a_step_without_rows_is_taken(name: str) -> None:
    policy = policy_of(name, "alike")
    step = Step("pool", 1, keys_of([]), np.full(0, Phase.DECODE, dtype=np.uint8))

    policy.on_step_started(step)
    policy.on_layer_routed(LayerRouting.from_picks(policy.catalogue, step, 0, np.empty((0, 2), dtype=np.int64)))
