"""Slots of several sizes: what a budget gives, in which order, and who gets a place."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from tests.examples import examples

layers = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 12), st.sampled_from([4, 5, 9, 32])).map(
        lambda drawn: (drawn[0], min(drawn[:2]), drawn[2])
    ),
    min_size=1,
    max_size=8,
)
"""Experts, top-k and bytes of each."""


def sizes_of(drawn: list[tuple[int, int, int]]) -> SlotSizes:
    experts, top_k, nbytes = zip(*drawn, strict=True)
    return SlotSizes(Catalogue("pool", experts_per_layer=experts, top_k=top_k, expert_bytes=nbytes))


def test_by_hand() -> None:
    sizes = sizes_of([(4, 2, 10), (4, 1, 3), (8, 2, 10)])
    assert sizes.bytes_of.tolist() == [3, 10]
    assert sizes.order.tolist() == [0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert (sizes.least, sizes.nbytes(3), sizes.within(22), sizes.within(23)) == (2, 23, 2, 3)
    assert sizes.places(8).tolist() == [2, 6]
    assert sizes.describe() == "3 B to 10 B"
    assert (sizes.host_slots(2), sizes.host_slots(12), sizes.host_slots(13)) == (0, 0, 2)


@settings(max_examples=examples(200), deadline=None)
@given(drawn=layers, budget=st.integers(0, 4000))
def test_a_budget_gives_as_many_slots_as_it_holds_and_every_class_its_share(
    drawn: list[tuple[int, int, int]], budget: int
) -> None:
    sizes = sizes_of(drawn)
    slots = sizes.within(budget)

    assert sizes.nbytes(slots) == sum(sizes.slot_bytes(slots)) <= budget
    assert slots == sizes.experts or sizes.nbytes(slots + 1) > budget
    places = sizes.places(slots)
    assert places.sum() == slots
    experts = np.bincount(sizes.class_of)
    assert (places <= experts).all()
    if slots >= sizes.classes:
        assert (places >= 1).all()
    if slots >= sizes.least:
        alike = sizes.picked.max() * sizes.bytes_of[-1]
        assert sizes.nbytes(sizes.least) <= max(alike, sizes.bytes_of.sum()), (
            "no more than with slots that are all alike"
        )
    if slots >= np.maximum(1, sizes.picked).sum():
        assert (places >= sizes.picked).all()
        beyond = places > np.maximum(1, sizes.picked)  # of those that routers pick no class waits for another
        most = (places / experts)[beyond].max(initial=0.0)
        assert ((places + 1) / experts >= most - 1e-12).all(), "none is more than a slot behind the others' share"


@settings(max_examples=examples(100), deadline=None)
@given(drawn=layers, seed=st.integers(0, 999))
def test_the_first_ones_of_each_class_get_its_places(drawn: list[tuple[int, int, int]], seed: int) -> None:
    sizes = sizes_of(drawn)
    random = np.random.default_rng(seed)
    ranked = random.permutation(sizes.experts)[: int(random.integers(0, sizes.experts + 1))]
    left = {number: int(random.integers(0, 5)) for number in range(sizes.classes)}
    places = np.array(list(left.values()))

    expected = []
    for key in ranked.tolist():
        number = int(sizes.class_of[key])
        if left[number]:
            left[number] -= 1
            expected.append(key)

    assert sizes.placed(ranked, places).tolist() == expected
