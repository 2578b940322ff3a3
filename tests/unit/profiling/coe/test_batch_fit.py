"""K, B and the maximum batch out of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.profiling.coe.batch_fit import batch_times, fit_line, furthest_off, largest_useful_batch

sizes = st.lists(st.integers(1, 128), min_size=2, max_size=8, unique=True)
any_times = st.dictionaries(st.integers(1, 128), st.floats(0.01, 1e4), min_size=1, max_size=8)


@given(sizes, st.floats(0, 50), st.floats(0.01, 50))
def test_a_line_is_found_again(sizes: list[int], batch_ms: float, request_ms: float) -> None:
    found = fit_line({size: batch_ms + request_ms * size for size in sizes})
    assert found.request_ms == pytest.approx(request_ms, rel=1e-6, abs=1e-6)
    assert found.batch_ms == pytest.approx(batch_ms, rel=1e-6, abs=1e-5)


@given(any_times, st.floats(-1, 1), st.floats(-1, 1))
def test_no_other_line_without_negative_costs_is_nearer(times: dict[int, float], more: float, later: float) -> None:
    found = fit_line(times)
    assert min(found) >= 0

    def error(request_ms: float, batch_ms: float) -> float:
        return sum((batch_ms + request_ms * size - ms) ** 2 for size, ms in times.items())

    other = max(0.0, found.request_ms + more), max(0.0, found.batch_ms + later)
    assert error(*found) <= error(*other) * (1 + 1e-9) + 1e-6


def test_the_maximum_batch_is_where_the_time_a_request_plateaus() -> None:
    times = {1: 10.0, 2: 12.0, 4: 16.0, 8: 30.0, 16: 58.0}  # a request: 10, 6, 4, 3.75, 3.625
    assert largest_useful_batch(times) == 8
    assert largest_useful_batch(times, within=0.0) == 16
    assert largest_useful_batch(times, within=0.11) == 4


@given(any_times)
def test_no_smaller_batch_is_within_five_percent_of_the_best(times: dict[int, float]) -> None:
    most = largest_useful_batch(times)
    best = min(ms / size for size, ms in times.items())
    assert times[most] / most <= 1.05 * best
    assert all(ms / size > 1.05 * best for size, ms in times.items() if size < most)


def test_sizes_that_are_never_run_do_not_bend_the_line() -> None:
    found = batch_times({1: 3.0, 2: 4.0, 4: 6.0, 8: 40.0, 16: 200.0})
    assert found.most == 4
    assert (found.request_ms, found.batch_ms) == pytest.approx((1.0, 2.0))
    assert furthest_off(found) == pytest.approx(0.0, abs=1e-9)


def test_times_between_and_beyond_the_measured_sizes() -> None:
    found = batch_times({1: 3.0, 4: 6.0})
    assert [found.ms_of(requests) for requests in (1, 2, 4, 8)] == [3.0, 4.0, 6.0, 12.0]
