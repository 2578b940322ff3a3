"""Groups of rows by their paths: the paper's equations by hand, and what every grouping keeps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.array_types import Scores
from greenroom.policies.expertflow import grouping
from greenroom.policies.expertflow.grouping import (
    active_experts,
    balanced_medoids,
    expected_union,
    grouped,
    similarity,
    swapped,
)
from tests.examples import examples

# Two layers of three experts, one picked in each.
PATHS = np.array(
    [
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 1],
        [0, 0, 1, 0, 0, 1],
    ],
    dtype=np.float32,
)


def drawn(rows: int, experts: int, seed: int, *, known: bool = False) -> Scores:
    chances = np.random.default_rng(seed).random((rows, experts), dtype=np.float32) ** 4
    return (chances > 0.3).astype(np.float32) if known else chances


def test_equation_4_is_an_or() -> None:
    assert expected_union(PATHS[:2]).tolist() == [1, 0, 0, 1, 1, 0]
    halves = np.array([[0.5, 0, 1], [0.5, 0.25, 0]], dtype=np.float32)
    assert expected_union(halves).tolist() == [0.75, 0.25, 1]


def test_equation_5_counts_each_expert_of_each_layer_once_a_batch() -> None:
    assert active_experts(PATHS, [np.array([0, 1]), np.array([2, 3])]) == 3 + 3
    assert active_experts(PATHS, [np.array([0, 2]), np.array([1, 3])]) == 4 + 4
    assert active_experts(PATHS, [np.arange(4)]) == 6


def test_equation_6_is_one_less_the_share_of_places_that_differ() -> None:
    alike = similarity(PATHS)
    assert np.allclose(np.diagonal(alike), 1)
    assert alike[0, 1] == pytest.approx(1 - 2 / 6)
    assert alike[0, 2] == pytest.approx(1 - 4 / 6)
    assert np.array_equal(alike, alike.T)


def of_one_kind(order: np.ndarray, groups: list[np.ndarray]) -> bool:
    return {len(set((order[group] // 6).tolist())) for group in groups} == {1}


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_share_experts_run_together_whatever_the_start(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(12)
    paths = np.repeat(np.eye(2, 9, dtype=np.float32), 6, axis=0)[order]

    assert of_one_kind(order, grouped(paths, [6, 6], seed=seed))


def test_medoids_alone_find_them_where_they_start_from_unlike_rows() -> None:
    order = np.random.default_rng(0).permutation(12)
    paths = np.repeat(np.eye(2, 9, dtype=np.float32), 6, axis=0)[order]

    found = [of_one_kind(order, grouped(paths, [6, 6], literal=True, seed=seed)) for seed in range(20)]

    assert sum(found) >= 10


def test_what_exceeds_a_group_goes_to_the_other_those_first_that_lose_least() -> None:
    """Five like one medoid, one like the other: of the five, the two that are least like the first leave."""
    paths = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1],
                      [0, 0, 0, 1, 1]], dtype=np.float32)  # fmt: skip
    for seed in range(6):
        first = balanced_medoids(similarity(paths), 3, seed=seed)
        assert sorted([np.flatnonzero(first).tolist(), np.flatnonzero(~first).tolist()]) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("rows", "groups", "looks"),
    [(64, 2, True), (64, 4, True), (64, 8, True), (64, 64, False), (200, 2, False), (200, 8, True)],
)
def test_all_groups_of_a_decision_share_the_work_of_looking_for_swaps(
    rows: int, groups: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, work = 6144, []
    improve = grouping._Swaps.improve

    def counted(swaps: grouping._Swaps) -> bool:
        work.append(experts * sum(map(len, swaps.rows)) ** 2)
        return improve(swaps)

    monkeypatch.setattr(grouping._Swaps, "improve", counted)

    grouped(drawn(rows, experts, 0), [rows // groups] * groups)

    assert sum(work) <= grouping._WORK
    assert bool(work) == looks


def test_swaps_find_the_best_halves_where_these_can_be_counted() -> None:
    """Of all ways to halve ten rows: from any start the swaps end within 5 % of the best on average."""
    rows, ratios = 10, []
    for seed in range(10):
        paths = drawn(rows, 40, seed, known=True)
        halves = [np.isin(np.arange(rows), part) for part in itertools.combinations(range(rows), rows // 2)]
        best = min(active_experts(paths, [np.flatnonzero(one), np.flatnonzero(~one)]) for one in halves)
        ratios.append(active_experts(paths, grouped(paths, [5, 5], seed=seed)) / best)
    assert np.mean(ratios) < 1.05


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    experts=st.integers(1, 30),
    seed=st.integers(0, 999),
    literal=st.booleans(),
    known=st.booleans(),
)
def test_groups_have_their_sizes_and_each_row_is_in_one(
    sizes: list[int], experts: int, seed: int, literal: bool, known: bool
) -> None:
    paths = drawn(sum(sizes), experts, seed, known=known)
    paths.setflags(write=False)

    groups = grouped(paths, sizes, literal=literal, seed=seed)

    assert [len(group) for group in groups] == sizes
    assert sorted(itertools.chain.from_iterable(map(np.ndarray.tolist, groups))) == list(range(sum(sizes)))
    again = grouped(paths.copy(), sizes, literal=literal, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(groups, again, strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(rows=st.integers(2, 16), experts=st.integers(1, 60), seed=st.integers(0, 999), known=st.booleans())
def test_swaps_never_cost_an_expert_and_keep_sizes(rows: int, experts: int, seed: int, known: bool) -> None:
    paths = drawn(rows, experts, seed, known=known)
    first = np.random.default_rng(seed).permutation(rows) < rows // 2

    after = swapped(paths, first)

    def needed(one: np.ndarray) -> float:
        return active_experts(paths, [np.flatnonzero(one), np.flatnonzero(~one)])

    assert after.sum() == first.sum()
    assert needed(after) <= needed(first) + 1e-3
