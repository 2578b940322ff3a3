from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.moe_infinity.eamc import distance
from greenroom.predictor.kinds.eamc.members import choose_members, shape_of
from tests.examples import examples

LAYERS = (4, 6, 3)
SIZE = sum(LAYERS)


def kinds(number: int, each: int, *, noise: float = 0.05, seed: int = 0) -> np.ndarray:
    """Sequences of so many kinds, ``each`` of them one after the other, of any length."""
    rng = np.random.default_rng(seed)
    usual = rng.dirichlet(np.full(SIZE, 0.1), number)
    drawn = np.repeat(usual, each, axis=0) * (1 + noise * rng.standard_normal((number * each, SIZE)))
    return np.maximum(drawn * rng.integers(50, 5000, (number * each, 1)), 0).astype(np.float32)


def test_each_kind_of_sequence_has_a_member_and_it_is_one_of_them() -> None:
    matrices = kinds(8, 20)
    members = choose_members(LAYERS, matrices, capacity=8)
    assert sorted(members.tolist()) == members.tolist()
    assert {member // 20 for member in members.tolist()} == set(range(8))


def test_the_member_is_the_nearest_to_the_centre_of_its_kind() -> None:
    matrices = kinds(2, 30, noise=0.3)
    catalogue = shape_of(LAYERS)
    for member in choose_members(LAYERS, matrices, capacity=2).tolist():
        own = matrices[member // 30 * 30 : member // 30 * 30 + 30]
        shares = own / own.sum(axis=1, keepdims=True)
        to_centre = [distance(catalogue, one, shares.mean(axis=0)) for one in own]
        assert to_centre[member % 30] <= np.quantile(to_centre, 0.2)


def test_the_same_sequences_and_seed_choose_the_same() -> None:
    matrices = kinds(12, 10, noise=0.2)
    first = choose_members(LAYERS, matrices, capacity=9, seed=3)
    assert first.tolist() == choose_members(LAYERS, matrices, capacity=9, seed=3).tolist()


def test_how_long_a_sequence_is_does_not_matter() -> None:
    matrices = kinds(5, 8)
    longer = matrices * np.arange(1, 41, dtype=np.float32)[:, None]
    assert choose_members(LAYERS, matrices, capacity=5).tolist() == choose_members(LAYERS, longer, capacity=5).tolist()


def test_no_more_distinct_sequences_than_members_are_all_of_them_once() -> None:
    matrices = np.repeat(kinds(3, 1), 4, axis=0)
    assert choose_members(LAYERS, matrices, capacity=3).tolist() == [0, 4, 8]
    assert choose_members(LAYERS, matrices, capacity=100).tolist() == [0, 4, 8]


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**16))
def test_there_are_never_more_than_there_is_room_for_and_each_once(count: int, capacity: int, seed: int) -> None:
    matrices = np.random.default_rng(seed).integers(0, 3, (count, SIZE)).astype(np.float32)
    if not matrices.any():
        return
    members = choose_members(LAYERS, matrices, capacity=capacity, seed=seed)
    assert 1 <= len(members) <= min(capacity, count)
    assert len(set(members.tolist())) == len(members)
    assert matrices[members].any(axis=1).all(), "a sequence without tokens stands for nothing"


def test_what_nothing_can_be_chosen_from_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least one sequence"):
        choose_members(LAYERS, np.zeros((4, SIZE)))
    with pytest.raises(InvalidConfig, match="capacity"):
        choose_members(LAYERS, kinds(1, 1), capacity=0)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"pip install 'greenroom\[eamc\]'"):
        choose_members(LAYERS, kinds(4, 4), capacity=2)
