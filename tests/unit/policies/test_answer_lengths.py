"""How long an answer is expected to be, before it begins and while it goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.answer_lengths import ENOUGH, AnswerLengths, expected_length, unknown_tokens
from tests.unit.policies.model_profiles import model_profile, task_profile

EVEN = [[1, 1], [1, 1]]


def test_a_profile_is_preferred_and_other_types_are_learnt() -> None:
    lengths = AnswerLengths(model_profile({"code": task_profile(EVEN, writes=40)}, load_ms={1: 10.0}))
    for _ in range(ENOUGH):
        lengths.finished("code", 7)
        lengths.finished("poems", 9)
    assert (lengths.mean("code"), lengths.mean("poems"), lengths.mean("new")) == (40, 9, 40)
    assert AnswerLengths().mean("code") is None


def test_memory_goes_by_what_was_seen_where_that_is_longer_than_the_profile_says() -> None:
    lengths = AnswerLengths(model_profile({"code": task_profile(EVEN, writes=40)}, load_ms={1: 10.0}))
    assert lengths.held_tokens("code", 10, 500) == 40
    for _ in range(ENOUGH):
        lengths.finished("code", 300)
        lengths.finished("poems", 7)
    assert (lengths.mean("code"), lengths.held_mean("code")) == (40, 300)
    assert lengths.held_tokens("code", 10, 500) == 300
    assert lengths.held_tokens("poems", 10, 500) == 7, "no profile of it, so it is what was seen"
    assert lengths.held_tokens("new", 10, 500) == 40
    for _ in range(5000):
        lengths.finished("code", 7)
    assert lengths.held_mean("code") == 40, "a profile that expects more costs places, not rows"


def test_it_says_when_what_it_said_has_become_wrong() -> None:
    lengths = AnswerLengths()
    changes = []
    for tokens in [40] * ENOUGH + [41] * 20 + [400] * 2:
        lengths.finished("chat", tokens)
        changes.append(lengths.changes)
    assert changes[ENOUGH - 2 : ENOUGH] == [0, 2], "the type's mean, and that of all"
    assert changes[ENOUGH + 19] == 2, "a token more is nothing to speak of"
    assert changes[-1] == 6


def test_answers_that_were_cut_short_teach_nothing_of_those_that_come_to_their_own_ends() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.finished("chat", 1, cut=True)
    assert lengths.mean("chat") is None
    for _ in range(ENOUGH):
        lengths.finished("chat", 40)
        lengths.finished("chat", 5, cut=True)
    assert lengths.mean("chat") == 40


def test_answers_that_were_cut_and_are_longer_than_expected_do() -> None:
    lengths = AnswerLengths()
    for _ in range(ENOUGH):
        lengths.finished("prose", 1000, cut=True)
        lengths.finished("prose", 100, cut=True)
    assert (lengths.mean("prose") or 0) > 500
    for _ in range(1000):
        lengths.finished("prose", 100, cut=True)
    assert (lengths.mean("prose") or 0) > 500, "what ends at 100 would have been longer"


def test_where_nothing_is_known_it_is_a_share_of_the_context_within_bounds() -> None:
    assert unknown_tokens(24, 1000) == 64
    assert unknown_tokens(96, 4000) == 256
    assert unknown_tokens(0, 1 << 20) == 256
    assert unknown_tokens(0, 2048) == 128
    assert unknown_tokens(10, 24) == 24


def test_an_answer_that_goes_on_is_expected_to_be_half_as_long_again() -> None:
    assert [expected_length(10, generated, 100) for generated in (0, 9, 10, 15, 16, 90, 100)] == [
        10, 10, 16, 16, 25, 100, 100,
    ]  # fmt: skip


@given(st.floats(0, 1e9), st.integers(0, 10**6), st.integers(1, 10**6))
def test_it_is_more_than_what_is_there_and_at_most_the_limit(first: float, generated: int, limit: int) -> None:
    expected = expected_length(first, generated, limit)
    assert 1 <= expected <= limit
    assert expected > min(generated, limit - 1)
    assert expected <= expected_length(first, generated + 1, limit)
