"""Decayed frequency and expected next use: their formulas, computed plainly, and what they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.replacement.decayed_frequency import Decayed
from greenroom.policies.replacement.next_use import NextUse
from tests.examples import examples
from tests.unit.policies.bench import Bench, routing_of

CATALOGUE = Catalogue.uniform("pool", layers=3, experts=4, top_k=2)


@given(
    groups=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True), min_size=1, max_size=25),
    decay=st.sampled_from([0.2, 0.9, 0.999]),
)
@settings(max_examples=examples(60), deadline=None)
def test_decayed_is_the_sum_over_uses_of_the_decay_to_the_uses_since(groups: list[list[int]], decay: float) -> None:
    policy = Decayed(CATALOGUE, decay=decay)
    for group in groups:
        policy.on_layer_routed(routing_of(CATALOGUE, group))
    uses = [expert for group in groups for expert in group]
    plain = np.zeros(CATALOGUE.size)
    for position, expert in enumerate(uses):
        plain[expert] += decay ** (len(uses) - position)

    worth, _ = policy.worth(Tier.DEVICE)

    assert np.allclose(worth / worth.sum(), plain / plain.sum(), rtol=1e-9)


def test_decayed_goes_on_where_the_weight_of_a_use_would_overflow() -> None:
    policy = Decayed(CATALOGUE, decay=0.01)
    for _ in range(500):
        policy.on_layer_routed(routing_of(CATALOGUE, [1, 2]))
    policy.on_layer_routed(routing_of(CATALOGUE, range(12)))

    worth, _ = policy.worth(Tier.DEVICE)
    assert np.isfinite(worth).all()
    assert worth.argmax() == 11


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, float("nan")])
def test_a_decay_outside_zero_to_one_is_refused(decay: float) -> None:
    with pytest.raises(InvalidConfig, match="decay"):
        Decayed(CATALOGUE, decay=decay)


def test_next_use_prefers_the_frequent_and_of_equals_the_layer_that_comes_sooner() -> None:
    engine = Bench(NextUse(CATALOGUE))
    for _ in range(4):  # experts 0 and 1 of each layer always
        for layer in range(3):
            engine.use(4 * layer, 4 * layer + 1, layer=layer)
    engine.use(0, 1, layer=0)
    engine.use(4, 6, layer=1)  # 5 fails to come for the first time
    inside = [0, 1, 4, 5, 8, 9]

    # 6 came once. 5 was used less than the others. Layer 1 has just run, layer 0 before it, layer 2 comes next.
    assert engine.victims(7, among=[*inside, 6]) == [6, 5, 4, 0, 1, 8, 9]


def test_more_sequences_in_a_step_do_not_make_next_use_forget_faster() -> None:
    few, many = NextUse(CATALOGUE), NextUse(CATALOGUE)
    for step in range(6):
        few.on_layer_routed(routing_of(CATALOGUE, [step % 2], layer=0))
        many.on_layer_routed(routing_of(CATALOGUE, [step % 2, 2, 3], layer=0))

    assert few.worth(Tier.DEVICE)[0][:2].tolist() == many.worth(Tier.DEVICE)[0][:2].tolist()


def test_what_is_expected_counts_in_the_place_of_the_next_turn_until_the_layer_has_run() -> None:
    policy = NextUse(CATALOGUE)
    for _ in range(3):
        for layer in range(3):
            policy.on_layer_routed(routing_of(CATALOGUE, [4 * layer], layer=layer))
    before = policy.worth(Tier.DEVICE)[0]

    policy.expect(CATALOGUE.span(1), np.array([0.0, 1.0, 0.0, 0.0]))
    expecting = policy.worth(Tier.DEVICE)[0]
    assert expecting[4] < before[4]
    assert expecting[5] > before[5]
    assert (np.delete(expecting, range(4, 8)) == np.delete(before, range(4, 8))).all()

    twin = NextUse(CATALOGUE)
    for _ in range(3):
        for layer in range(3):
            twin.on_layer_routed(routing_of(CATALOGUE, [4 * layer], layer=layer))
    for each in (policy, twin):
        each.on_layer_routed(routing_of(CATALOGUE, [4], layer=1))
    assert (policy.worth(Tier.DEVICE)[0] == twin.worth(Tier.DEVICE)[0]).all()

    policy.expect(CATALOGUE.span(2), np.zeros(4))
    policy.expect_nothing()
    assert (policy.worth(Tier.DEVICE)[0] == twin.worth(Tier.DEVICE)[0]).all()


@pytest.mark.parametrize("options", [{"fast": 1.0}, {"slow": 0.0}, {"horizon": 0.0}])
def test_next_use_refuses_rates_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        NextUse(CATALOGUE, **options)
