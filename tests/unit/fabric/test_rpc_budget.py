"""How many retries there may be, and how long before each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.rpc import Budget, RetryConfig


@given(
    tokens=st.floats(0, 20),
    earned=st.floats(0, 1),
    steps=st.lists(st.booleans(), max_size=200),
)
def test_retries_never_exceed_what_there_was_and_what_was_earned(
    tokens: float, earned: float, steps: list[bool]
) -> None:
    budget = Budget(RetryConfig(tokens=tokens, earned_by_call=earned))
    calls = retries = 0
    for wants_retry in steps:
        if wants_retry:
            retries += budget.take()
        else:
            budget.called()
            calls += 1
        assert retries <= tokens + earned * calls + 1e-6
        assert 0 <= budget.tokens <= tokens


@given(draw=st.floats(0, 1), attempts=st.integers(1, 12))
def test_pauses_double_within_their_bounds(draw: float, attempts: int) -> None:
    config = RetryConfig(attempts=attempts, first_pause_s=0.1, longest_pause_s=1.0)
    pauses = list(Budget(config, draw=lambda: draw).pauses())
    assert len(pauses) == attempts - 1
    for number, pause in enumerate(pauses):
        whole = min(1.0, 0.1 * 2**number)
        assert whole / 2 <= pause <= whole + 1e-9


def test_pauses_are_drawn_anew() -> None:
    draws = iter([0.0, 1.0])
    pauses = Budget(RetryConfig(first_pause_s=1, longest_pause_s=1), draw=lambda: next(draws)).pauses()
    assert (next(pauses), next(pauses)) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", -1), ("earned_by_call", 1.5), ("attempts", 0), ("first_pause_s", 0), ("first_pause_s", 5)],
)
def test_what_a_budget_can_not_be(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        RetryConfig(**{field: value})  # type: ignore[arg-type]
