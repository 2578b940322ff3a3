"""The decay window, held against the paper's numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.profiling.coe.decay_window import Window, choose, decay_windows, deviates, expected_next


def test_the_papers_window() -> None:
    """Section 5: with W₀ = 15 the final window is 28 to 39 experts, the third, which is the first that can be."""
    windows = decay_windows(100, 15)
    assert windows[:4] == [(0, 15), (15, 28), (28, 39), (39, 48)]
    assert not deviates([20.0], 1.0)


@given(st.integers(1, 500), st.floats(0.5, 100))
def test_windows_follow_each_other_to_the_last_expert(experts: int, percent: float) -> None:
    windows = decay_windows(experts, percent)
    assert windows[0].lower == 0
    assert windows[-1].upper == experts
    assert all(one.upper == other.lower for one, other in itertools.pairwise(windows))
    assert all(one.lower < one.upper for one in windows)


def test_windows_sum_to_all_experts_without_rounding() -> None:
    decay, upper, size = 0.85, 0.0, 15.0
    for _ in range(200):
        upper += size
        size *= decay
    assert upper == pytest.approx(100)


@pytest.mark.parametrize("percent", [0.0, -1.0, 101.0])
def test_a_first_window_of_more_than_all_or_of_nothing_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="at most 100"):
        decay_windows(100, percent)


def test_the_line_through_the_first_throughputs() -> None:
    assert expected_next([10.0, 20.0]) == pytest.approx(30.0)
    assert expected_next([10.0, 20.0, 15.0]) == pytest.approx(20.0)


def test_sliding_stops_beyond_the_margin_alone() -> None:
    assert not deviates([10.0, 20.0], 28.6)  # 4.7 % below 30
    assert deviates([10.0, 20.0], 28.4)  # 5.3 %
    assert not deviates([10.0, 20.0], 50.0)  # more than expected
    assert deviates([20.0, 10.0], 0.0)  # expected is nothing


def peaked(residents: int) -> float:
    """As Fig. 18: rises to 34 experts, then falls. A step of 11 costs more than 5 %."""
    return 26.7 - 0.35 * abs(residents - 34)


def test_the_search_finds_the_best_in_the_window() -> None:
    found = choose(100, peaked, seed=1)
    assert found.window == (28, 39)
    assert max(found.per_s, key=found.per_s.__getitem__) == 34
    assert found.residents == 35  # 1.3 % less
    assert found.window.lower <= found.drawn <= found.window.upper
    assert found.per_s[found.drawn] == peaked(found.drawn)


def test_a_draw_follows_from_the_seed() -> None:
    drawn = [choose(100, peaked, seed=seed).drawn for seed in range(40)]
    assert drawn == [choose(100, peaked, seed=seed).drawn for seed in range(40)]
    assert len(set(drawn)) > 5


def test_the_search_goes_on_where_throughput_still_rises() -> None:
    """A curve that rises ever less leaves its line long before its peak."""

    def saturating(residents: int) -> float:
        return 100 - (residents - 90) ** 2 / 100

    found = choose(100, saturating, seed=0)
    assert found.window.upper < 60
    assert max(found.per_s, key=found.per_s.__getitem__) == 90


def test_of_numbers_that_are_as_good_the_largest_is_taken() -> None:
    """Where residents make no difference, intermediates need no more."""
    flat = choose(100, lambda residents: 10.0 if residents <= 62 else 5.0, seed=0, also=[62])
    assert flat.residents == 62
    assert flat.per_s[62] == 10.0


def test_a_number_is_tried_once_at_most() -> None:
    tried: list[int] = []

    def noted(residents: int) -> float:
        tried.append(residents)
        return peaked(residents)

    choose(100, noted, seed=0)
    assert len(tried) == len(set(tried))


@given(st.integers(1, 120), st.integers(0, 200), st.integers(0, 9))
def test_any_peak_is_answered_by_what_was_tried(experts: int, peak: int, seed: int) -> None:
    found = choose(experts, lambda residents: 1000.0 - abs(residents - peak), seed)
    assert isinstance(found.window, Window)
    assert 1 <= found.residents <= experts
    assert found.per_s[found.residents] >= 0.98 * max(found.per_s.values())
    assert {found.drawn, found.window.upper} <= found.per_s.keys()
