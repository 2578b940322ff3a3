"""The quick way of counting hits: every eviction is the policy's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import BudgetTooSmall
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Artifact, Phase, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from greenroom.policies.replacement.lru import Lru
from greenroom.replay import ReplayResult, RoutingTrace, quick, replay
from greenroom.replay.quick import count, count_hits, rule_of
from greenroom.replay.rule import Group, Rule
from greenroom.replay.traces.activation_matrices import activation_matrices
from greenroom.replay.traces.steps import TraceStep, groups
from tests.unit.replay.traces import trace_of

RULES: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("fifo", {}),
    ("lru", {}),
    ("neighbour-aware", {}),
    ("neighbour-aware", {"radius": 0}),
    ("neighbour-aware", {"radius": 3}),
    ("lfu", {}),
    ("lfu-reset", {}),
    ("decayed", {}),
    ("decayed", {"decay": 0.9}),
    ("decayed", {"decay": 1e-20}),  # sums are brought down every few uses
    ("next-use", {}),
    ("next-use", {"fast": 0.3, "slow": 0.999, "horizon": 2.7}),
    ("next-use", {"host": True}),
    ("decayed", {"host": True}),
    ("look-ahead", {}),
    ("look-ahead", {"retention": "lfu"}),
    ("moe-infinity", {}),
    ("moe-infinity", {"literal": True, "refine": False}),
    ("moe-infinity", {"by_ratio": False}),
    ("moe-infinity", {"by_layer": False}),
]
WITHOUT = {"belady", "emoe", "next-layer", "popularity", "reuse", "static", "top-k", "traced-top-k"}


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    """Layers of different widths, rows with fewer picks than others, a few experts picked far more than the rest, the
    first rows of a sequence in one step or in one each.
    """
    widths = np.array(draw(st.lists(st.integers(2, 9), min_size=1, max_size=4)))
    k = draw(st.integers(1, int(widths.min())))
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (sum(lengths), len(widths))
    scores = random.random((*shape, int(widths.max()))) ** (1 + np.arange(widths.max()))
    scores[:, np.arange(widths.max()) >= widths[:, None]] = -1
    picks = np.argsort(-scores, axis=-1, kind="stable")[:, :, :k].astype(np.uint8)
    if draw(st.booleans()):
        picks[random.random(picks.shape) < 0.3] = 255
    phase = None
    if draw(st.booleans()):
        prompt = draw(st.integers(0, 9))
        places = np.concatenate([np.arange(length) for length in lengths])
        phase = np.where(places < prompt, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    return RoutingTrace(picks, np.concatenate(([0], np.cumsum(lengths))), widths, phase=phase)


def plain(policy: ExpertPolicy, trace: RoutingTrace, concurrent: int, slots: int) -> tuple[ReplayResult, list[int]]:
    """What ``replay`` counts, and who left, in order."""
    left: list[int] = []

    class Watched(type(policy)):  # type: ignore[misc]
        def on_evicted(self, tier: Tier, experts: Keys) -> None:
            super().on_evicted(tier, experts)
            left.extend(experts.tolist())

    policy.__class__ = Watched
    return replay(policy, trace.steps(concurrent=concurrent), slots), left


class Watched(Rule):
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.left: list[int] = []

    def begin_step(self, step: TraceStep, layers: Sequence[Group]) -> None:
        self.rule.begin_step(step, layers)

    def route(self, layer: int, group: Group, missing: Group, leaving: int) -> Sequence[int]:
        victims = self.rule.route(layer, group, missing, leaving)
        self.left.extend(victims)
        return victims

    def end_step(self, step: TraceStep) -> None:
        self.rule.end_step(step)


@pytest.mark.parametrize(("name", "options"), RULES, ids=lambda value: value if isinstance(value, str) else str(value))
@settings(max_examples=60, deadline=None)
@given(trace=traces(), concurrent=st.integers(1, 4), share=st.floats(0, 1))
def test_who_leaves_is_whom_the_policy_lets_go(
    name: str, options: Mapping[str, Any], trace: RoutingTrace, concurrent: int, share: float
) -> None:
    catalogue = trace.catalogue()
    widest = int(catalogue.experts_per_layer.max())
    slots = widest + int(share * (catalogue.size - widest))

    def policy() -> ExpertPolicy:
        return create_policy(name, catalogue=catalogue, options=options)

    rule = rule_of(policy())
    assert rule is not None
    watched = Watched(rule)
    counted = count(watched, catalogue, trace.steps(concurrent=concurrent), slots)

    assert (counted, watched.left) == plain(policy(), trace, concurrent, slots)
    assert count_hits(policy(), trace.steps(concurrent=concurrent), slots) == counted


@pytest.mark.parametrize(("name", "options"), RULES, ids=lambda value: value if isinstance(value, str) else str(value))
@pytest.mark.parametrize("concurrent", [1, 8])
def test_so_it_is_over_a_long_run(name: str, options: Mapping[str, Any], concurrent: int) -> None:
    trace = trace_of(300, 200, 100, 150, 50, 100, 200, 150, 250, layers=5, k=3, experts=16, seed=7)
    catalogue = trace.catalogue()
    policy = create_policy(name, catalogue=catalogue, options=options)

    counted = count_hits(policy, trace.steps(concurrent=concurrent), 30)

    again = create_policy(name, catalogue=catalogue, options=options)
    assert counted == replay(again, trace.steps(concurrent=concurrent), 30)
    assert counted.evictions > 1000


def test_every_policy_has_a_rule_or_is_known_to_have_none() -> None:
    catalogue = Catalogue.uniform("pool", layers=2, experts=4, top_k=2)

    without = {name for name in EXPERT_POLICIES if rule_of(create_policy(name, catalogue=catalogue)) is None}

    assert without == WITHOUT


def test_a_subclass_decides_for_itself() -> None:
    class Own(Lru):
        pass

    assert rule_of(Own(Catalogue.uniform("pool", layers=2, experts=4, top_k=2))) is None


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_what_has_no_rule_is_replayed_the_plain_way(name: str) -> None:
    trace = trace_of(60, layers=3, k=2, experts=8)

    counted = count_hits(create_policy(name, catalogue=trace.catalogue()), trace.steps(), 9)

    assert counted == replay(create_policy(name, catalogue=trace.catalogue()), trace.steps(), 9)


def test_an_eamc_changes_no_hits_where_nothing_is_fetched_ahead() -> None:
    trace = trace_of(*[40] * 12, layers=4, k=2, experts=8, seed=3)
    eamc = Artifact(EAMC, "1", {MATRICES: activation_matrices(trace)[:5]})

    def policy() -> ExpertPolicy:
        made = create_policy("moe-infinity", catalogue=trace.catalogue())
        made.on_artifact_swapped(eamc)
        return made

    counted = count_hits(policy(), trace.steps(concurrent=3), 12)

    assert counted == replay(policy(), trace.steps(concurrent=3), 12)
    assert counted.evictions > 100


def test_an_encoder_decoder_is_replayed_the_plain_way() -> None:
    """What counts as the first layer changes from phase to phase."""
    catalogue = Catalogue("p", experts_per_layer=[4, 4], top_k=[1, 1], expert_bytes=[1, 1], decoder_start=1)

    assert rule_of(create_policy("moe-infinity", catalogue=catalogue)) is None
    assert rule_of(Lru(catalogue)) is not None


def in_waves(catalogue: Catalogue) -> Catalogue:
    return catalogue


def of_two_sizes(catalogue: Catalogue) -> Catalogue:
    per_layer = catalogue.experts_per_layer.tolist()
    sizes = [1 + layer % 2 for layer in range(catalogue.layers)]
    return Catalogue("pool", experts_per_layer=per_layer, top_k=catalogue.top_k.tolist(), expert_bytes=sizes)


@pytest.mark.parametrize("changed", [in_waves, of_two_sizes])
def test_what_no_rule_can_do_is_replayed_the_plain_way(
    changed: Callable[[Catalogue], Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(*[10] * 8, layers=3, k=2, experts=8)
    catalogue = changed(trace.catalogue())
    budget = 4 if changed is in_waves else 20
    monkeypatch.setattr(quick, "count", None)

    counted = count_hits(Lru(catalogue), trace.steps(concurrent=8), budget)

    assert counted == replay(Lru(catalogue), trace.steps(concurrent=8), budget)


def test_a_budget_for_less_than_a_row_is_refused() -> None:
    trace = trace_of(4, k=3)

    with pytest.raises(BudgetTooSmall, match="picks experts of 3 bytes"):
        count_hits(Lru(trace.catalogue()), trace.steps(), 2)


@given(trace=traces(), concurrent=st.integers(1, 4))
def test_groups_are_the_distinct_picks_of_a_layer(trace: RoutingTrace, concurrent: int) -> None:
    catalogue = trace.catalogue()
    expected = []
    for step in trace.steps(concurrent=concurrent):
        for layer in range(trace.layers):
            own = [int(pick) for pick in step.picks[:, layer].ravel() if pick < catalogue.experts_per_layer[layer]]
            keys = [catalogue.key(layer, pick) for pick in (own if len(step.picks) == 1 else sorted(set(own)))]
            expected.append(keys)

    assert list(groups(catalogue, trace.steps(concurrent=concurrent))) == expected
