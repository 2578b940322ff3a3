"""Every eviction of a replay is the rule's own, worked out anew from all that happened before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Artifact, LayerRouting, SequenceEnd, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.moe_infinity.replacement import EPSILON
from greenroom.policies.registry import create_policy
from greenroom.policies.replacement.next_use import NO_CHANCE
from greenroom.replay import RoutingTrace, replay
from greenroom.replay.traces.activation_matrices import activation_matrices
from tests.examples import examples
from tests.unit.replay.traces import odd_traces, trace_of

Worth = Callable[["History", int], tuple[float, ...]]


class History:
    """What happened, in plain Python."""

    def __init__(self, policy: ExpertPolicy) -> None:
        self.catalogue = policy.catalogue
        self.now = 0
        self.uses: dict[int, list[int]] = {expert: [] for expert in range(policy.catalogue.size)}
        self.layer = 0
        self.chances: dict[float, dict[int, float]] = {keep: {} for keep in (0.3, 0.8, 0.97, 0.999)}
        self.arrivals = 0
        self.arrived: dict[int, int] = {}
        self.since_loaded: Counter[int] = Counter()
        self.tokens: dict[int, Counter[int]] = {}

    def use(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            self.now += 1
            self.uses[expert].append(self.now)
        self.since_loaded.update(experts)
        self.layer = layer
        for keep, chances in self.chances.items():
            for expert in range(self.catalogue.spans[layer].start, self.catalogue.spans[layer].stop):
                before = chances.get(expert, 2 * NO_CHANCE)
                chances[expert] = keep * before + (1 - keep) * (expert in experts)

    def last(self, expert: int) -> int:
        return self.uses[expert][-1] if self.uses[expert] else 0

    def around(self, expert: int, radius: int) -> range:
        layer = self.catalogue.layer_of[expert]
        first, stop = self.catalogue.first[layer : layer + 2].tolist()
        return range(max(first, expert - radius), min(stop, expert + radius + 1))

    def chance(self, expert: int, keep: float) -> float:
        """Half of a moving average of whether the turns of the expert's layer used it."""
        return self.chances[keep].get(expert, 2 * NO_CHANCE) / 2

    def discount(self, expert: int, horizon: float) -> float:
        layers = self.catalogue.layers
        ahead = (self.catalogue.layer_of[expert] - self.layer - 1) % layers + 1
        return float((horizon / (1 + horizon)) ** (ahead / layers))

    def ratio(self, expert: int) -> float:
        """The share of its layer's tokens, summed over the sequences."""
        layer = self.catalogue.spans[self.catalogue.layer_of[expert]]
        sums = ((own, sum(own[other] for other in range(layer.start, layer.stop))) for own in self.tokens.values())
        return sum(own[expert] / total for own, total in sums if total)

    def decay(self, expert: int) -> float:
        return float(1 - self.catalogue.layer_of[expert] / self.catalogue.layers)


def next_use(fast: float = 0.8, slow: float = 0.97, horizon: float = 1.0) -> Worth:
    def worth(of: History, expert: int) -> tuple[float, ...]:
        chance = of.chance(expert, fast) + of.chance(expert, slow)
        return ((1 + horizon) * chance * of.discount(expert, horizon),)

    return worth


def neighbour_aware(radius: int) -> Worth:
    return lambda of, expert: (max(map(of.last, of.around(expert, radius))), of.last(expert))


def decayed(decay: float) -> Worth:
    return lambda of, expert: (sum(decay ** (of.now - time) for time in of.uses[expert]),)


RULES: list[tuple[str, Mapping[str, Any], Worth]] = [
    ("fifo", {}, lambda of, expert: (of.arrived[expert],)),
    ("lru", {}, lambda of, expert: (of.last(expert),)),
    ("neighbour-aware", {}, neighbour_aware(1)),
    ("neighbour-aware", {"radius": 0}, neighbour_aware(0)),
    ("neighbour-aware", {"radius": 3}, neighbour_aware(3)),
    ("lfu", {}, lambda of, expert: (len(of.uses[expert]), of.last(expert))),
    ("lfu-reset", {}, lambda of, expert: (of.since_loaded[expert], of.last(expert))),
    ("decayed", {}, decayed(0.9998)),
    ("decayed", {"decay": 0.9}, decayed(0.9)),
    ("decayed", {"host": True}, decayed(0.9998)),
    ("next-use", {}, next_use()),
    ("next-use", {"fast": 0.3, "slow": 0.999, "horizon": 2.7}, next_use(0.3, 0.999, 2.7)),
    ("next-use", {"host": True}, next_use()),
    ("look-ahead", {}, next_use()),
    ("look-ahead", {"retention": "lfu"}, lambda of, expert: (len(of.uses[expert]), of.last(expert))),
    ("moe-infinity", {}, lambda of, expert: ((of.ratio(expert) + EPSILON) * of.decay(expert),)),
    ("moe-infinity", {"by_ratio": False}, lambda of, expert: (of.decay(expert),)),
    ("moe-infinity", {"by_layer": False}, lambda of, expert: (of.ratio(expert) + EPSILON,)),
]


def watched(policy: ExpertPolicy, history: History, worth: Worth) -> tuple[ExpertPolicy, list[int]]:
    """The policy, checked at every request for victims, and the experts that left."""
    left: list[int] = []

    class Watched(type(policy)):  # type: ignore[misc]
        def on_layer_routed(self, routing: LayerRouting) -> None:
            super().on_layer_routed(routing)
            experts = routing.experts.tolist()
            history.use(routing.layer, experts)
            assert routing.picks is not None
            first = int(self.catalogue.first[routing.layer])
            for sequence, picks in zip(routing.step.row_sequences.tolist(), routing.picks.tolist(), strict=True):
                own = history.tokens.setdefault(sequence, Counter())
                own.update(first + pick for pick in picks if pick < self.catalogue.experts_per_layer[routing.layer])

        def on_transfer_done(self, transfer: Transfer) -> None:
            super().on_transfer_done(transfer)
            history.arrivals += 1
            history.arrived[transfer.expert] = history.arrivals

        def on_evicted(self, tier: Tier, experts: Keys) -> None:
            super().on_evicted(tier, experts)
            left.extend(experts.tolist())
            for expert in experts.tolist():
                history.since_loaded[expert] = 0

        def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
            super().on_sequence_ended(sequence, end)
            history.tokens.pop(sequence, None)

        def victims(self, request: VictimRequest) -> Keys:
            victims: Keys = super().victims(request)
            staying = request.evictable.copy()
            staying[victims] = False
            cheapest = min((worth(history, expert) for expert in np.flatnonzero(staying).tolist()), default=None)
            for victim in victims.tolist():
                own = worth(history, victim)
                assert cheapest is None or own <= cheapest or own == pytest.approx(cheapest, rel=1e-5), own
            return victims

    policy.__class__ = Watched
    return policy, left


@pytest.mark.parametrize(("name", "options", "worth"), RULES, ids=[f"{name}-{options}" for name, options, _ in RULES])
@settings(max_examples=examples(30), deadline=None)
@given(trace=odd_traces(), concurrent=st.integers(1, 4), share=st.floats(0, 1))
def test_no_expert_that_stays_is_worth_less_than_one_that_leaves(
    name: str,
    options: Mapping[str, Any],
    worth: Worth,
    trace: RoutingTrace,
    concurrent: int,
    share: float,
) -> None:
    catalogue = trace.catalogue()
    widest = int(catalogue.experts_per_layer.max())
    slots = widest + int(share * (catalogue.size - widest))
    policy = create_policy(name, catalogue=catalogue, options=options)

    policy, left = watched(policy, History(policy), worth)

    assert replay(policy, trace.steps(concurrent=concurrent), slots).evictions == len(left)


def test_an_eamc_changes_no_hits_where_nothing_is_fetched_ahead() -> None:
    trace = trace_of(*[40] * 12, layers=4, k=2, experts=8, seed=3)
    without = create_policy("moe-infinity", catalogue=trace.catalogue())
    informed = create_policy("moe-infinity", catalogue=trace.catalogue())
    informed.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: activation_matrices(trace)[:5]}))

    counted = replay(informed, trace.steps(concurrent=3), 12)

    assert counted == replay(without, trace.steps(concurrent=3), 12)
    assert counted.evictions > 100
