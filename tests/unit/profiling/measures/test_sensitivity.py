from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from greenroom.profiling.measures.sensitivity import Disturbed, insensitive_prefix, limit_of
from greenroom.profiling.measures.similarity import TokenOverlap
from greenroom.profiling.model.profiled_model import Answer

shares = st.floats(0, 1)


def test_a_prefix_ends_where_a_shorter_one_was_below_the_threshold() -> None:
    assert insensitive_prefix([1.0, 0.95, 0.86, 0.85, 0.7, 0.99], 0.85) == 3
    assert insensitive_prefix([1.0, 0.2, 0.99, 0.99], 0.85) == 0
    assert insensitive_prefix([1.0, 0.9, 0.9], 0.85) == 2


@given(st.lists(shares, min_size=1, max_size=12), shares)
def test_every_shorter_prefix_is_above_the_threshold_and_the_next_is_not(alike: list[float], threshold: float) -> None:
    similarity = [1.0, *alike]
    layers = insensitive_prefix(similarity, threshold)
    assert all(one >= threshold for one in similarity[: layers + 1])
    assert layers == len(alike) or similarity[layers + 1] < threshold


@given(st.lists(shares, min_size=1, max_size=12), shares, shares)
def test_a_lower_threshold_never_makes_fewer_layers_insensitive(alike: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert insensitive_prefix([1.0, *alike], low) >= insensitive_prefix([1.0, *alike], high)


def test_an_answer_may_grow_to_twice_its_length_and_not_beyond_the_limit() -> None:
    answer = Answer((1,) * 20, cut=False)
    assert limit_of(answer, 256) == 48
    assert limit_of(answer, 30) == 30


def test_a_task_has_the_mean_over_its_prompts_and_the_spread_over_seeds() -> None:
    similarity = np.ones((2, 3, 3))
    similarity[0, 1] = [0.9, 0.1, 0.8]
    similarity[1, 1] = [0.7, 0.1, 1.0]
    similarity[:, 2] = 0.5
    right = np.full((2, 3, 3), np.nan)
    right[:, :, 0] = [[1, 1, 0], [1, 0, 0]]
    right[:, :, 2] = 1
    disturbed = Disturbed(similarity, right)
    found = disturbed.of(np.array([True, False, True]), 0.85)
    assert found.similarity == (1.0, 0.85, 0.5)
    assert found.least == (1.0, 0.85, 0.5)
    assert found.most == (1.0, 0.85, 0.5)
    assert found.exact == (1.0, 0.75, 0.5)
    assert found.insensitive_layers == 1
    assert disturbed.of(np.array([False, True, False]), 0.85).exact is None, "it has no right answer to hold against"


def test_words_in_common() -> None:
    overlap = TokenOverlap()
    pairs = [("a b c", "a b c"), ("a b", "c d"), ("a a b", "a b b c"), ("", ""), ("a", "")]
    assert overlap(pairs).tolist() == [1.0, 0.0, 4 / 7, 1.0, 0.0]


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_overlap_is_mutual_and_whole_for_the_same_words_alone(one: list[str], other: list[str]) -> None:
    overlap = TokenOverlap()
    there, back = overlap([(" ".join(one), " ".join(other)), (" ".join(other), " ".join(one))])
    assert there == back
    assert (there == 1.0) == (sorted(one) == sorted(other))
