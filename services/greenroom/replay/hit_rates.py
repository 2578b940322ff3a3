"""Hit rates: a policy, or Belady's optimum, against recorded routing. Transfers take no time here.

Counts look-ups, hits and evictions of one device arena that fetches on demand only. Prefetches are not carried out,
since what they gain is time: see ``greenroom.replay.simulation.timed_replay``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import BudgetTooSmall
from greenroom.policies.base.array_types import Counts, Keys, Mask
from greenroom.policies.base.events import (
    UNKNOWN_TASK,
    LayerRouting,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.base.streaming import stream_slots
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.replacement.belady import belady
from greenroom.replay.traces.replayed_paths import ReplayedPaths
from greenroom.replay.traces.steps import TraceStep, groups


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A look-up is one distinct expert of one layer of one step; a hit is a look-up of a resident expert."""

    lookups: int
    hits: int
    evictions: int

    @property
    def misses(self) -> int:
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of look-ups that hit; 0 where there were none."""
        return self.hits / self.lookups if self.lookups else 0.0


class ReplayCache:
    """The device arena of a replay: carries out the policy's decisions and counts. Starts empty."""

    def __init__(self, policy: ExpertPolicy, budget_bytes: int) -> None:
        self.policy = policy
        self.catalogue = policy.catalogue
        self._here = bytearray(self.catalogue.size)  # of a few experts quicker to read than an array
        self.resident: Mask = np.frombuffer(self._here, dtype=np.bool_)
        self.sizes = SlotSizes(self.catalogue)
        slots = self.sizes.places(self.sizes.within(budget_bytes)).tolist()
        self.free: list[int] = list(slots)
        """By size class, slots that hold nothing."""
        self._slots: list[int] = slots
        self._classes: list[int] = self.sizes.class_of.tolist()
        self.lookups = 0
        self.hits = 0
        self.evictions = 0
        self._streams = "streams" in policy.hooks
        self._passage = [stream_slots(1, count) for count in slots]
        self._told_of_evictions = "on_evicted" in policy.hooks
        self._transfers = [
            Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.ON_DEMAND)
            for expert in range(self.catalogue.size if "on_transfer_done" in policy.hooks else 0)
        ]
        policy.on_budget_changed(Tier.DEVICE, budget_bytes)

    @property
    def result(self) -> ReplayResult:
        """The counts so far."""
        return ReplayResult(self.lookups, self.hits, self.evictions)

    def route(self, routing: LayerRouting) -> None:
        """Use a layer's experts: those that miss are fetched in the order of the event, into slots of their own size.

        None of them can be evicted meanwhile. Where they do not fit all at once, the layer runs in waves as in the
        engine: experts that have run make room for the next. Raises BudgetTooSmall where one expert alone does not fit.
        """
        self.policy.on_layer_routed(routing)
        experts = routing.experts
        here = self._here
        absent = [expert for expert in experts.tolist() if not here[expert]]
        self.lookups += len(experts)
        self.hits += len(experts) - len(absent)
        if not absent:
            return
        missing = np.array(absent, dtype=np.int64)
        size_class = self._classes[absent[0]]
        if self._streams and len(absent) > self._passage[size_class] and self.policy.streams(routing, missing):
            self._pass_through(experts, missing, size_class)
        elif len(experts) > self._slots[size_class]:
            self._in_waves(experts, missing, size_class)
        else:
            if len(absent) > self.free[size_class]:
                evictable = self._residents(size_class).copy()
                evictable[experts] = False
                self._make_room(len(absent) - self.free[size_class], evictable, missing, size_class)
            self._bring(missing, size_class)

    def _residents(self, size_class: int) -> Mask:
        """Of the class. Not to be written to."""
        return self.resident if self.sizes.classes == 1 else self.resident & self.sizes.members[size_class]

    def _bring(self, experts: Keys, size_class: int) -> None:
        self.resident[experts] = True
        self.free[size_class] -= len(experts)
        if self._transfers:
            for expert in experts.tolist():
                self.policy.on_transfer_done(self._transfers[expert])

    def _in_waves(self, group: Keys, missing: Keys, size_class: int) -> None:
        """Resident experts run first, then as many as there is room for. Other layers' experts leave before this
        one's."""
        evictable = self._residents(size_class).copy()
        evictable[group] = False
        while len(missing):
            candidates = evictable if evictable.any() else self._residents(size_class).copy()
            needed = min(len(missing) - self.free[size_class], int(np.count_nonzero(candidates)))
            if needed > 0:
                self._make_room(needed, candidates, missing, size_class)
                evictable &= self.resident
            fitting = self.free[size_class]
            if not fitting and not candidates.any():
                raise BudgetTooSmall(f"there is no slot for expert {missing[0]}")
            self._bring(missing[:fitting], size_class)
            missing = missing[fitting:]

    def _pass_through(self, group: Keys, missing: Keys, size_class: int) -> None:
        """As in the engine: a few are fetched, then each of the others once another has run. Residents have run by the
        time that the first one lands."""
        waiting = np.zeros_like(self.resident)
        waiting[group] = True
        for place in range(len(missing)):
            if place == self._passage[size_class]:
                waiting[group] = False
                waiting[missing] = True
            if place >= self._passage[size_class]:
                waiting[missing[place - self._passage[size_class]]] = False  # it has run
            own = missing[place : place + 1]
            if not self.free[size_class]:
                evictable = self._residents(size_class) & ~waiting
                self._make_room(1, evictable if evictable.any() else self._residents(size_class), own, size_class)
            self._bring(own, size_class)

    def _make_room(self, slots: int, evictable: Mask, missing: Keys, size_class: int) -> None:
        bytes_needed = slots * int(self.sizes.bytes_of[size_class])
        request = VictimRequest(
            Tier.DEVICE, bytes_needed, evictable, self._residents(size_class), reason=Reason.ON_DEMAND, incoming=missing
        )
        victims = self.policy.victims(request)
        if len(victims) < slots:
            raise BudgetTooSmall(f"the policy frees {len(victims)} of {slots} slots that a layer needs")
        self.resident[victims] = False
        self.free[size_class] += len(victims)
        self.evictions += len(victims)
        if self._told_of_evictions:
            self.policy.on_evicted(Tier.DEVICE, victims)


def check_budget(catalogue: Catalogue, budget_bytes: int) -> None:
    """Raises BudgetTooSmall where the budget does not hold the experts that a row uses in a layer."""
    sizes = SlotSizes(catalogue)
    least = sizes.nbytes(sizes.least)
    if budget_bytes < least:
        raise BudgetTooSmall(f"{sizes.say_least()}, experts of {least} bytes; the budget is {budget_bytes}")


def replay(
    policy: ExpertPolicy,
    steps: Iterable[TraceStep],
    budget_bytes: int,
    *,
    tasks: tuple[str, ...] | None = None,
    paths: TokenPaths | None = None,
) -> ReplayResult:
    """Run every step's layers, ascending, through ``policy`` under a device budget.

    In a step of one row a layer's experts are used in the recorded order, with several rows in ascending order.
    ``tasks``: those of the trace's sequences. ``paths``: foretells each step's rows where their tokens were recorded.
    Raises BudgetTooSmall where a layer's top-k experts do not fit.
    """
    catalogue, hooks = policy.catalogue, policy.hooks
    check_budget(catalogue, budget_bytes)
    cache = ReplayCache(policy, budget_bytes)
    entered, done = "on_layer_entered" in hooks, "on_layer_done" in hooks
    experts_done = "on_experts_done" in hooks
    foretold = ReplayedPaths(paths)
    for number, traced in enumerate(steps):
        for sequence in traced.started:
            info = SequenceInfo(sequence, UNKNOWN_TASK if tasks is None else tasks[sequence])
            policy.on_sequence_queued(info)
            policy.on_sequence_started(info)
        step = Step(catalogue.pool, number, traced.sequences, traced.phases, traced.tokens, foretold.of(traced))
        if "on_step_started" in hooks:
            policy.on_step_started(step)
        for layer, (experts, rows) in enumerate(_used(catalogue, traced.picks)):
            if entered:
                policy.on_layer_entered(step, layer)
            routing = LayerRouting(catalogue, step, layer, experts, rows, traced.picks[:, layer])
            cache.route(routing)
            if experts_done:
                policy.on_experts_done(step, layer, experts)
            if done:
                policy.on_layer_done(step, layer)
        foretold.ran(traced)
        for sequence in traced.ended:
            policy.on_sequence_ended(sequence, SequenceEnd.FINISHED)
    return cache.result


def optimum(catalogue: Catalogue, steps: Iterable[TraceStep], slots: int) -> ReplayResult:
    """Belady's farthest next use over single accesses, for a cache of ``slots`` experts: the most hits possible in this
    order of a layer's experts, in the slots that each size class has. It holds no expert for the rest of its layer.

    A policy may have a few more where a layer's residents are used before others come.
    """
    accesses = np.fromiter(itertools.chain.from_iterable(groups(catalogue, steps)), dtype=np.int64)
    sizes = SlotSizes(catalogue)
    hits = evictions = 0
    for number, places in enumerate(sizes.places(slots).tolist()):
        own = accesses[sizes.class_of[accesses] == number]
        found = int(np.count_nonzero(belady(own, places)))
        hits += found
        evictions += max(0, len(own) - found - places)
    return ReplayResult(len(accesses), hits, evictions)


def _used(catalogue: Catalogue, picks: NDArray[np.integer]) -> list[tuple[Keys, Counts]]:
    """Each layer's distinct experts in their order of use, and the rows of each, from a step's ``picks[T, layers, k]``.

    All layers at once, which costs a fraction of ``LayerRouting.from_picks`` for each.
    """
    keys = picks + catalogue.first[:-1, None]
    real = picks < catalogue.experts_per_layer[:, None]
    if len(picks) == 1:
        own = list(keys[0]) if real.all() else [row[there] for row, there in zip(keys[0], real[0], strict=True)]
        ones = np.ones(picks.shape[2], dtype=np.int64)
        return [(experts, ones[: len(experts)]) for experts in own]
    counts = np.bincount(keys[real], minlength=catalogue.size)
    used = counts.nonzero()[0]
    rows, bounds = counts[used], np.searchsorted(used, catalogue.first).tolist()
    return [(used[start:stop], rows[start:stop]) for start, stop in itertools.pairwise(bounds)]
