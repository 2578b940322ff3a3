"""Replay of hits on plain numbers: the decisions of ``greenroom.replay.hit_rates``, several times faster.

There a policy is told of each layer as an engine would tell it. Here the rule behind it is worked out access by access,
without events and with next to no arrays. What makes that possible: experts are fetched on demand alone, they are of
one size, a layer fits at once, and nobody's rank changes but as its own layer is routed. Policies without a rule here,
and budgets below the widest layer, are replayed the plain way. ``tests/unit/replay/test_quick.py`` holds every rule to
its policy, eviction by eviction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.policies.prefetching.look_ahead import LookAhead
from greenroom.policies.replacement.decayed_frequency import LARGEST, Decayed, powers_up_to
from greenroom.policies.replacement.fifo import Fifo
from greenroom.policies.replacement.lfu import Lfu, LfuReset
from greenroom.policies.replacement.lru import Lru
from greenroom.policies.replacement.neighbour_aware import NeighbourAware
from greenroom.policies.replacement.next_use import NO_CHANCE, NextUse
from greenroom.replay.hit_rates import ReplayResult, check_budget, replay
from greenroom.replay.quick_activation import LeastActivated
from greenroom.replay.rule import Group, Rule
from greenroom.replay.traces.steps import TraceStep, layers_of

_TIME_BITS = 31
"""So many lower bits of a rank say when an expert was used; those above them count more."""


def count_hits(
    policy: ExpertPolicy,
    steps: Iterable[TraceStep],
    budget_bytes: int,
    *,
    tasks: tuple[str, ...] | None = None,
) -> ReplayResult:
    """What ``replay`` counts for this policy, which must be new, and is used up. Arguments and errors are the same."""
    rule = rule_of(policy)
    size = policy.catalogue.record_bytes
    if rule is None or size is None or budget_bytes // size < int(policy.catalogue.experts_per_layer.max()):
        return replay(policy, steps, budget_bytes, tasks=tasks)
    check_budget(policy.catalogue, budget_bytes)
    return count(rule, policy.catalogue, steps, budget_bytes // size)


def rule_of(policy: ExpertPolicy) -> Rule | None:
    """The rule of a new policy, None where there is none: by its exact class, since a subclass may decide otherwise."""
    if type(policy) is LookAhead:
        # Nobody answers its requests here, and without predictions it is its retention.
        return rule_of(policy.retention)
    if type(policy) is MoeInfinity and policy.catalogue.decoder_start:
        return None  # which of its layers comes first changes from phase to phase
    rule = _RULES.get(type(policy))
    return None if rule is None else rule(policy)


def count(rule: Rule, catalogue: Catalogue, steps: Iterable[TraceStep], slots: int) -> ReplayResult:
    """Run ``steps`` through a cache of so many slots that starts empty."""
    resident: set[int] = set()
    free, lookups, misses, evictions = slots, 0, 0, 0
    for step in steps:
        layers = layers_of(catalogue, step)
        rule.begin_step(step, layers)
        for layer, group in enumerate(layers):
            missing = [expert for expert in group if expert not in resident]
            leaving = max(0, len(missing) - free)
            victims = rule.route(layer, group, missing, leaving)
            lookups += len(group)
            if missing:
                resident.difference_update(victims)
                resident.update(missing)
                free += leaving - len(missing)
                misses += len(missing)
                evictions += leaving
        rule.end_step(step)
    return ReplayResult(lookups, lookups - misses, evictions)


# -- rules by which a resident's rank changes with its use alone ---------------------------------------------------


class _ByUse(Rule):
    """``_rank[N]``: the resident of the least number leaves, of equals the lower key. Who can not leave has the largest
    of all: whoever is not here and, while victims are chosen, whoever is used.
    """

    def __init__(self, policy: ExpertPolicy, never: float = np.iinfo(np.int64).max) -> None:
        self._never = never
        self._rank: NDArray[Any] = np.full(policy.catalogue.size, never)
        self._now = 1

    def route(self, layer: int, group: Group, missing: Group, leaving: int) -> Sequence[int]:
        ranks = self._use(group, missing)
        victims = self._leave(group, leaving) if leaving else ()
        for expert, rank in zip(group, ranks, strict=True):
            self._rank[expert] = rank
        return victims

    @abstractmethod
    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        """The ranks of ``group`` from now on."""

    def _leave(self, group: Group, count: int) -> Group:
        rank, never = self._rank, self._never
        for expert in group:
            rank[expert] = never
        victims = []
        for _ in range(count):
            victim = int(rank.argmin())
            rank[victim] = never
            victims.append(victim)
        return victims

    def _times(self, count: int) -> range:
        """When these uses are: every use has a time of its own."""
        times = range(self._now, self._now + count)
        self._now += count
        if self._now >> _TIME_BITS:
            raise OverflowError(f"ranks tell 2^{_TIME_BITS} uses apart, and this trace makes more")
        return times


class FirstIn(_ByUse):
    def __init__(self, policy: Fifo) -> None:
        super().__init__(policy)
        self._arrived = [0] * policy.catalogue.size

    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        for expert, time in zip(missing, self._times(len(missing)), strict=True):
            self._arrived[expert] = time
        return [self._arrived[expert] for expert in group]


class LeastRecent(_ByUse):
    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        return self._times(len(group))


class LeastRecentNeighbours(_ByUse):
    def __init__(self, policy: NeighbourAware) -> None:
        super().__init__(policy)
        self._around = [sorted(set(around)) for around in policy.neighbours.tolist()]
        self._own = [0] * policy.catalogue.size
        self._shared = [0] * policy.catalogue.size
        self._here = bytearray(policy.catalogue.size)

    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        rank, own, shared = self._rank, self._own, self._shared
        for expert, time in zip(group, self._times(len(group)), strict=True):
            own[expert] = time
            for other in self._around[expert]:
                shared[other] = time
        for expert in group:
            for other in self._around[expert]:
                if self._here[other]:
                    rank[other] = shared[other] << _TIME_BITS | own[other]
        for expert in missing:
            self._here[expert] = True
        return [shared[expert] << _TIME_BITS | own[expert] for expert in group]

    def _leave(self, group: Group, count: int) -> Group:
        victims = super()._leave(group, count)
        for victim in victims:
            self._here[victim] = False
        return victims


class LeastFrequent(_ByUse):
    def __init__(self, policy: Lfu | LfuReset) -> None:
        super().__init__(policy)
        self._counts = [0] * policy.catalogue.size

    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        counts = self._counts
        for expert in group:
            counts[expert] += 1
        times = self._times(len(group))
        return [counts[expert] << _TIME_BITS | time for expert, time in zip(group, times, strict=True)]


class LeastFrequentSinceLoaded(LeastFrequent):
    def _leave(self, group: Group, count: int) -> Group:
        victims = super()._leave(group, count)
        for victim in victims:
            self._counts[victim] = 0
        return victims


class LeastDecayedSum(_ByUse):
    """As in the policy, sums are kept in a unit that grows, and brought down when it is too large."""

    def __init__(self, policy: Decayed) -> None:
        super().__init__(policy, np.inf)
        self._decay = policy.decay
        self._powers = powers_up_to(64, policy.decay).tolist()
        self._sums = [0.0] * policy.catalogue.size
        self._unit = 1.0

    def _use(self, group: Group, missing: Group) -> Iterable[float]:
        if len(group) >= len(self._powers):
            self._powers = powers_up_to(2 * len(group), self._decay).tolist()
        sums, powers, unit = self._sums, self._powers, self._unit
        for place, expert in enumerate(group):
            sums[expert] += powers[place] * unit
        self._unit *= powers[len(group)]
        if self._unit > LARGEST:
            self._sums = sums = [value / self._unit for value in sums]
            self._rank /= self._unit
            self._unit = 1.0
        return [sums[expert] for expert in group]


# -- next use ------------------------------------------------------------------------------------------------------


class LeastExpected(Rule):
    """All layers' chances are moved on at once; a layer takes up its own as it is routed."""

    def __init__(self, policy: NextUse) -> None:
        size = policy.catalogue.size
        self._spans = policy.catalogue.spans
        self._keep, self._gain = policy.keep[:, None], policy.gain[:, None]
        self._horizon = policy.horizon
        self._discounts = policy.discounts
        self._rates: NDArray[np.float64] = np.full((2, size), NO_CHANCE)
        self._coming: NDArray[np.float64] = np.empty(size)
        self._worth: NDArray[np.float64] = np.full(size, np.inf)  # before the discount; of residents alone
        self._absent: NDArray[np.float64] = np.full(size, np.inf)  # 0 for residents
        self._rank: NDArray[np.float64] = np.empty(size)

    def begin_step(self, step: TraceStep, layers: Sequence[Group]) -> None:
        used = [expert for group in layers for expert in group]
        self._rates *= self._keep
        self._rates[:, used] += self._gain
        chance = self._rates[0] + self._rates[1]
        self._coming = chance + self._horizon * chance

    def route(self, layer: int, group: Group, missing: Group, leaving: int) -> Sequence[int]:
        span, worth, absent = self._spans[layer], self._worth, self._absent
        coming = self._coming[span]
        np.add(coming, absent[span], out=worth[span])
        victims = []
        if leaving:
            rank = np.multiply(worth, self._discounts[layer], out=self._rank)
            for expert in group:
                rank[expert] = np.inf
            for _ in range(leaving):
                victim = int(rank.argmin())
                rank[victim] = worth[victim] = absent[victim] = np.inf
                victims.append(victim)
        for expert in missing:
            worth[expert] = coming[expert - span.start]
            absent[expert] = 0.0
        return victims


_RULES: dict[type[ExpertPolicy], Callable[[Any], Rule]] = {
    Fifo: FirstIn,
    Lru: LeastRecent,
    NeighbourAware: LeastRecentNeighbours,
    Lfu: LeastFrequent,
    LfuReset: LeastFrequentSinceLoaded,
    Decayed: LeastDecayedSum,
    MoeInfinity: LeastActivated,
    NextUse: LeastExpected,
}
