"""Which experts get a slot, by the tokens that are expected (eMoE, section 3.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.policies.base.allocation import Allocation, shares_of
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from tests.examples import examples

ALIKE = Catalogue.uniform("pool", layers=3, experts=6, top_k=2, expert_bytes=10)
CATALOGUES = {
    "alike": ALIKE,
    "uneven": Catalogue("pool", experts_per_layer=[4, 8, 1], top_k=[2, 3, 1], expert_bytes=[10, 25, 7]),
    "whole models": Catalogue.of_models("graph", [40, 10, 25, 25, 5, 60, 10, 1]),
}
every_catalogue = pytest.mark.parametrize("shape", sorted(CATALOGUES))
seeds = st.integers(0, 2**32 - 1)


def choose(
    catalogue: Catalogue,
    tokens: NDArray[np.float64],
    budget: int,
    *,
    here: Mask | None = None,
    popularity: NDArray[np.float64] | None = None,
) -> Mask:
    none = np.zeros(catalogue.size, dtype=np.bool_)
    allocation = Allocation(catalogue)
    return allocation.choose(
        tokens,
        allocation.sizes.places(allocation.sizes.within(budget)),
        here=none if here is None else here,
        popularity=np.zeros(catalogue.size) if popularity is None else popularity,
    )


def drawn(catalogue: Catalogue, seed: int) -> tuple[NDArray[np.float64], Mask, NDArray[np.float64], int]:
    """Tokens (for some experts and some whole layers none), the resident experts, popularity, and a budget."""
    random = np.random.default_rng(seed)
    tokens = random.random(catalogue.size) * 1000 * (random.random(catalogue.size) < random.random())
    tokens *= (random.random(catalogue.layers) < 0.7)[catalogue.layer_of]
    here = random.random(catalogue.size) < random.random()
    return tokens, here, random.random(catalogue.size), int(random.integers(0, catalogue.bytes_of.sum() + 10))


def by_the_book(
    catalogue: Catalogue, tokens: NDArray[np.float64], here: Mask, popularity: NDArray[np.float64], budget: int
) -> set[int]:
    """The same in plain words: a loop over sorted lists."""

    def best(keys: list[int]) -> list[int]:
        return sorted(
            keys, key=lambda key: (-tokens[key], not here[key], -popularity[key] if not tokens[key] else 0, key)
        )

    least: list[int] = []
    for layer, span in enumerate(catalogue.spans):
        own = best(list(range(span.start, span.stop)))[: int(catalogue.top_k[layer])]
        if not tokens[span].any():
            own = [key for key in own if here[key]]
        least += own
    others = [key for key in range(catalogue.size) if tokens[key] > 0 and key not in least]
    sizes = SlotSizes(catalogue)
    left = {int(size): 0 for size in catalogue.bytes_of}  # places, by the size of a slot
    for slot in sizes.slot_bytes(sizes.within(budget)):
        left[slot] += 1
    chosen: set[int] = set()
    for key in (*best(least), *best(others)):
        if left[int(catalogue.bytes_of[key])]:
            chosen.add(key)
            left[int(catalogue.bytes_of[key])] -= 1
    return chosen


@every_catalogue
@settings(max_examples=examples(300), deadline=None)
@given(seed=seeds)
def test_it_is_what_the_rule_says(shape: str, seed: int) -> None:
    catalogue = CATALOGUES[shape]
    tokens, here, popularity, budget = drawn(catalogue, seed)

    chosen = choose(catalogue, tokens, budget, here=here, popularity=popularity)

    assert set(np.flatnonzero(chosen).tolist()) == by_the_book(catalogue, tokens, here, popularity, budget)
    assert catalogue.bytes_of[chosen].sum() <= budget


@every_catalogue
@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds)
def test_a_layer_that_expects_tokens_gets_its_routers_k_and_one_that_expects_none_loads_nothing(
    shape: str, seed: int
) -> None:
    catalogue = CATALOGUES[shape]
    tokens, here, popularity, _ = drawn(catalogue, seed)

    chosen = choose(catalogue, tokens, int(catalogue.bytes_of.sum()), here=here, popularity=popularity)

    for layer, span in enumerate(catalogue.spans):
        k = int(catalogue.top_k[layer])
        if tokens[span].any():
            assert np.count_nonzero(chosen[span]) >= k
        else:
            assert not (chosen[span] & ~here[span]).any()
            assert np.count_nonzero(chosen[span]) == min(k, np.count_nonzero(here[span]))


@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds, key=st.integers(0, ALIKE.size - 1), more=st.floats(0.5, 1e6))
def test_more_tokens_never_cost_an_expert_its_place(seed: int, key: int, more: float) -> None:
    tokens, here, popularity, budget = drawn(ALIKE, seed)
    before = choose(ALIKE, tokens, budget, here=here, popularity=popularity)
    tokens[key] += more

    after = choose(ALIKE, tokens, budget, here=here, popularity=popularity)

    assert after[key] or not before[key]


@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds)
def test_what_the_experts_of_a_layer_are_called_does_not_matter(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens, here = random.random(ALIKE.size), random.random(ALIKE.size) < 0.5
    budget = int(random.integers(0, 190))
    names = np.concatenate([random.permutation(6) + span.start for span in ALIKE.spans])

    plain = choose(ALIKE, tokens, budget, here=here)
    renamed = choose(ALIKE, tokens[names], budget, here=here[names])

    assert renamed.tolist() == plain[names].tolist()


@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds)
def test_without_tie_or_shortage_it_maximises_the_tokens_that_find_their_expert(seed: int) -> None:
    """Against every other set of one layer's k each and any others."""
    catalogue = Catalogue.uniform("pool", layers=2, experts=4, top_k=1, expert_bytes=1)
    random = np.random.default_rng(seed)
    tokens, budget = random.random(8), int(random.integers(2, 9))

    chosen = choose(catalogue, tokens, budget)

    best = max(
        float(tokens[[key for key in range(8) if number >> key & 1]].sum())
        for number in range(256)
        if number.bit_count() <= budget and number & 0b1111 and number >> 4
    )
    assert tokens[chosen].sum() == pytest.approx(best)


def test_equals_do_not_change_places() -> None:
    tokens = np.ones(ALIKE.size)
    here = np.zeros(ALIKE.size, dtype=np.bool_)
    here[[3, 5, 8, 9, 14, 17]] = True

    assert choose(ALIKE, tokens, 60, here=here).tolist() == here.tolist()
    assert choose(ALIKE, tokens * (1 + 1e-9 * np.arange(18)), 60, here=here).tolist() == here.tolist()


def test_shares_sum_to_one_in_each_layer_and_what_is_no_number_is_nothing() -> None:
    weights = np.array([1, 3, np.nan, np.inf, -5, 0, *[0] * 6, *[2] * 6], dtype=np.float32)

    shares = shares_of(ALIKE, weights)

    assert shares[:6].tolist() == [0.25, 0.75, 0, 0, 0, 0]
    assert shares[6:12].tolist() == [0] * 6
    assert shares[12:].sum() == pytest.approx(1)
