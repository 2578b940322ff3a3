"""Victims by a score: the least worth, enough of them, and no more than that."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.events import Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.victim_selection import lowest

SIZE = 12
small = st.integers(0, 4)


def request_for(bytes_needed: int, evictable: list[bool]) -> VictimRequest:
    mask = np.array(evictable)
    return VictimRequest(Tier.DEVICE, bytes_needed, mask, mask)


@given(
    st.lists(small, min_size=SIZE, max_size=SIZE),
    st.none() | st.lists(small, min_size=SIZE, max_size=SIZE),
    st.lists(st.booleans(), min_size=SIZE, max_size=SIZE),
    st.integers(-3, 40),
)
def test_of_equal_sizes_the_answer_is_the_head_of_a_plain_sort(
    worth: list[int], tie: list[int] | None, evictable: list[bool], bytes_needed: int
) -> None:
    catalogue = Catalogue.of_models("pool", [3] * SIZE)

    victims = lowest(
        catalogue,
        request_for(bytes_needed, evictable),
        np.array(worth),
        None if tie is None else np.array(tie),
    )

    count = max(0, -(-bytes_needed // 3))
    candidates = [key for key in range(SIZE) if evictable[key]]
    ranked = sorted(candidates, key=lambda key: (worth[key], 0 if tie is None else tie[key], key))
    assert victims.tolist() == (ranked[:count] if count <= len(candidates) else [])


@given(
    st.lists(st.integers(1, 9), min_size=SIZE, max_size=SIZE),
    st.lists(small, min_size=SIZE, max_size=SIZE),
    st.lists(st.booleans(), min_size=SIZE, max_size=SIZE),
    st.integers(1, 60),
)
def test_of_different_sizes_it_is_enough_and_none_of_them_is_needless(
    sizes: list[int], worth: list[int], evictable: list[bool], bytes_needed: int
) -> None:
    catalogue = Catalogue.of_models("pool", sizes)

    victims = lowest(catalogue, request_for(bytes_needed, evictable), np.array(worth)).tolist()

    available = sum(size for size, may_go in zip(sizes, evictable, strict=True) if may_go)
    if available < bytes_needed:
        assert victims == []
        return
    freed = sum(sizes[key] for key in victims)
    assert freed >= bytes_needed
    assert all(freed - sizes[key] < bytes_needed for key in victims)
    assert all(evictable[key] for key in victims)
    assert [worth[key] for key in victims] == sorted(worth[key] for key in victims)


def test_a_large_expert_spares_the_small_ones_ranked_before_it() -> None:
    catalogue = Catalogue.of_models("pool", [2, 3, 10, 1])

    victims = lowest(catalogue, request_for(9, [True] * 4), np.array([0, 1, 2, 3]))

    assert victims.tolist() == [2]


def test_scores_may_be_fractions() -> None:
    catalogue = Catalogue.of_models("pool", [1, 1, 1])

    assert lowest(catalogue, request_for(2, [True] * 3), np.array([0.5, 0.25, 0.4])).tolist() == [1, 2]
