"""A step's time by its rows: through what was measured, and never less with more rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.step_costs import StepCosts

DECODE = {1: 10.0, 2: 16.0, 4: 24.0}
PROMPTS = {2: 20.0, 8: 32.0, 16: 40.0}

points = st.dictionaries(st.integers(1, 300), st.floats(0.001, 1e4), min_size=1, max_size=8)
rows = st.integers(0, 600)


def rising(found: dict[int, float]) -> dict[int, float]:
    return dict(zip(sorted(found), sorted(found.values()), strict=True))


def test_between_measured_steps_whole_steps_lie_on_a_straight_line_and_beyond_them_a_row_costs_what_it_did() -> None:
    costs = StepCosts(DECODE, PROMPTS)
    assert [costs.step_ms(size) for size in (1, 2, 3, 4, 8)] == [10.0, 16.0, 20.0, 24.0, 48.0]
    assert [costs.token_ms(size) for size in (1, 2, 3, 4, 8)] == [10.0, 8.0, 20.0 / 3, 6.0, 6.0]


def test_steps_with_prompts_go_on_along_the_last_line() -> None:
    costs = StepCosts(DECODE, PROMPTS)
    assert [costs.step_ms(0, size) for size in (1, 2, 5, 8, 12, 16, 24)] == [20.0, 20.0, 26.0, 32.0, 36.0, 40.0, 48.0]
    assert StepCosts(DECODE, {4: 8.0}).step_ms(0, 8) == 16.0, "one point: a line from nothing"


def test_rows_that_decode_beside_a_prompt_count_as_rows_of_it_but_never_less_than_alone() -> None:
    costs = StepCosts(DECODE, PROMPTS)
    assert costs.step_ms(4, 4) == costs.step_ms(0, 8) == 32.0
    assert StepCosts({1: 10.0, 4: 90.0}, PROMPTS).step_ms(4, 4) == 90.0


def test_rows_that_decode_add_the_measured_share_of_their_own_step_to_one_with_prompts() -> None:
    costs = StepCosts(DECODE, PROMPTS, 0.5)
    assert [costs.step_ms(2, 8), costs.step_ms(4, 8), costs.step_ms(0, 8)] == [40.0, 44.0, 32.0]
    assert costs.step_ms(8, 1) == 48.0, "never less than they take alone"
    assert costs.reading_ms(np.array([8.0]), 4).tolist() == [44.0 - 24.0]


@given(points.map(rising), points.map(rising))
def test_what_was_measured_is_what_comes_out(decode: dict[int, float], prompts: dict[int, float]) -> None:
    costs = StepCosts(decode, prompts)
    assert [costs.step_ms(size) for size in decode] == pytest.approx(list(decode.values()))
    assert [costs.step_ms(0, size) for size in prompts] == pytest.approx(list(prompts.values()))


@given(points, points, st.none() | st.floats(0, 1), rows, rows, rows, rows)
def test_more_rows_never_take_less(
    decode: dict[int, float], prompts: dict[int, float], beside: float | None, d: int, p: int, more_d: int, more_p: int
) -> None:
    """Whatever was measured, in whatever disorder."""
    costs = StepCosts(decode, prompts, beside)
    if d + p:
        assert costs.step_ms(d + more_d, p + more_p) >= costs.step_ms(d, p) * (1 - 1e-9)


def test_a_size_that_took_longer_than_a_larger_one_was_disturbed_and_spoils_nothing_beyond() -> None:
    costs = StepCosts(DECODE, {64: 70.0, 256: 1500.0, 512: 300.0})
    assert costs.step_ms(0, 256) == costs.step_ms(0, 512) == 300.0


def test_what_reading_adds_to_the_steps_of_those_that_decode() -> None:
    costs = StepCosts(DECODE, PROMPTS)
    tokens = np.array([0.0, 2.0, 8.0, 16.0, 32.0])
    assert costs.reading_ms(tokens, 0).tolist() == [0.0, 20.0, 32.0, 40.0, 80.0], "32 tokens are two steps of 16"
    beside = costs.reading_ms(tokens, 4)
    assert beside.tolist()[:3] == [0.0, costs.step_ms(4, 2) - 24.0, costs.step_ms(4, 8) - 24.0]


@given(points, points, st.integers(0, 64), st.lists(st.floats(0, 5000), min_size=1, max_size=9))
def test_reading_more_never_takes_less(
    decode: dict[int, float], prompts: dict[int, float], d: int, tokens: list[float]
) -> None:
    found = StepCosts(decode, prompts).reading_ms(np.array(sorted(tokens)), d)
    assert (found >= 0).all()
    assert (np.diff(found) >= -1e-6 * found.max()).all()


def test_a_step_has_rows() -> None:
    for wrong in ((0, 0), (-1, 2), (2, -1)):
        with pytest.raises(ValueError, match="a step has rows"):
            StepCosts(DECODE, PROMPTS).step_ms(*wrong)


def test_beyond_the_largest_step_noise_between_neighbours_does_not_decide() -> None:
    """A step of 800 rows came out quicker than one of 790: whoever reads on beyond them still takes time."""
    steps = StepCosts({1: 1.0}, {100: 50.0, 400: 110.0, 790: 191.0, 800: 190.0})
    assert steps.step_ms(0, 1200) == pytest.approx(190 + 400 * (190 - 110) / (800 - 400))


def test_where_all_measured_steps_took_as_long_a_row_costs_its_share() -> None:
    assert StepCosts({1: 1.0}, {10: 20.0, 100: 20.0}).step_ms(0, 200) == pytest.approx(40.0)
