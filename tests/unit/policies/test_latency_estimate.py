"""Eq. 3, its alternative, and how many tokens are still expected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.placement.latency_estimate import (
    ESTIMATORS,
    Eq3,
    LatencyEstimator,
    Printed,
    ProcessorSharing,
    expected_left,
    latency_ms,
)
from greenroom.policies.placement.placement_policy import Costs, PendingRequest, PlacedRequest, WorkerView

ALL = [Eq3(), ProcessorSharing(), Printed()]
counts = st.integers(1, 500)


def request(name: str, *, tokens: int, inputs: int = 4, arrived: float = 0.0, task: str = "t") -> PendingRequest:
    return PendingRequest(name, arrived, inputs, inputs + tokens, tokens, deadline_ms=1e9, task=task)


# -- G


def test_g_counts_down_and_then_from_five_percent_again_and_again() -> None:
    assert [expected_left(40, made) for made in (0, 1, 39)] == [40, 39, 1]
    assert [expected_left(40, made) for made in (40, 41, 42, 43)] == [2, 1, 2, 1]
    assert expected_left(1, 7) == 1


@given(first=counts, made=st.integers(0, 5000), most=st.none() | counts)
def test_g_is_at_least_one_falls_by_one_a_token_and_rises_only_from_its_end(
    first: int, made: int, most: int | None
) -> None:
    left = expected_left(first, made, most)

    assert 1 <= left <= min(first, most or first)
    again = max(1, -(-first // 20))
    free, after = expected_left(first, made), expected_left(first, made + 1)
    assert after == (free - 1 if free > 1 else again)


def test_figures_that_are_no_counts_make_no_harm() -> None:
    assert expected_left(0, 0) == expected_left(-5, -7) == 1
    assert expected_left(10**18, 10**19) <= 10**18 // 20 + 1


# -- the estimators, against sums written out


def naive(estimator: LatencyEstimator, others: list[float], mine: float, *, new: bool) -> float:
    """Tokens until the request with ``mine`` left is done; ``others`` are the rest, without it."""
    if isinstance(estimator, Eq3):
        return (1 + sum(other >= mine for other in others)) * mine
    if isinstance(estimator, ProcessorSharing):
        return sum(min(other, mine) for other in others) + mine
    return sum(other > mine for other in others) * mine


@pytest.mark.parametrize("estimator", ALL)
@given(left=st.lists(counts, max_size=12), new=st.lists(counts, max_size=4))
def test_tokens_until_each_is_done(estimator: LatencyEstimator, left: list[int], new: list[int]) -> None:
    figures = np.sort(np.array(left, dtype=np.float64))

    among = estimator.among(figures)
    behind = estimator.behind(figures, np.array(new, dtype=np.float64))

    values = figures.tolist()
    rest = [values[:n] + values[n + 1 :] for n in range(len(values))]
    assert among.tolist() == [
        naive(estimator, others, mine, new=False) for others, mine in zip(rest, values, strict=True)
    ]
    assert behind.tolist() == [naive(estimator, values, float(mine), new=True) for mine in new]


@pytest.mark.parametrize("estimator", ALL)
@given(left=st.lists(counts, min_size=1, max_size=12), new=counts)
def test_what_one_more_adds_is_as_the_estimator_says(estimator: LatencyEstimator, left: list[int], new: int) -> None:
    figures = np.sort(np.array(left, dtype=np.float64))
    together = np.sort(np.append(figures, float(new)))
    before = dict(zip(figures.tolist(), estimator.among(figures).tolist(), strict=True))
    after = dict(zip(together.tolist(), estimator.among(together).tolist(), strict=True))

    for mine in figures.tolist():
        if isinstance(estimator, Printed):
            continue  # its n does not count the new one, so there is nothing to add
        added = mine * estimator.slows_shorter if mine <= new else new * estimator.slows_longer
        assert after[mine] == before[mine] + added


@given(left=st.lists(counts, max_size=12), new=counts)
def test_eq3_leaves_out_what_shorter_ones_generate(left: list[int], new: int) -> None:
    figures, one = np.sort(np.array(left, dtype=np.float64)), np.array([float(new)])
    shorter = sum(min(other, new) for other in left if other < new)

    assert ProcessorSharing().behind(figures, one)[0] - Eq3().behind(figures, one)[0] == shorter


# -- a latency as a whole


def test_the_whole_of_eq3() -> None:
    costs = Costs(token_ms_by_rows=(4.0, 3.0, 2.0), prefill_token_ms=0.5, load_ms_by_task={"t": 100.0})
    there = (
        PlacedRequest(request("a", tokens=10), 0.0, generated_tokens=4, expected_left=6),
        PlacedRequest(request("b", tokens=30, inputs=8), 40.0, generated_tokens=0, expected_left=30),
    )
    view = WorkerView("w", there, (), 8, 0, 1000, 1000, costs)
    mine = request("r", tokens=20, inputs=12, arrived=30.0)

    waited, loads, read = 20.0, 100.0, (12 + 8) * 0.5
    assert latency_ms(ESTIMATORS["eq3"], view, (), mine, 50.0) == waited + loads + read + 2 * 20 * 2.0
    sharing = latency_ms(ESTIMATORS["processor-sharing"], view, (), mine, 50.0)
    assert sharing == waited + loads + read + (6 + 20 + 20) * 2.0


def test_what_goes_there_just_before_counts_and_its_experts_only_once() -> None:
    costs = Costs(token_ms=1.0, load_ms_by_task={"t": 100.0, "u": 10.0})
    view = WorkerView("w", (), (request("queued", tokens=50),), 8, 4, 1000, 1000, costs)
    before = (request("first", tokens=50, task="u"), request("second", tokens=50))

    assert latency_ms(Eq3(), view, before, request("r", tokens=20), 0.0) == 110.0 + 16.0 + 4 * 20.0


def test_a_clock_that_is_behind_makes_no_negative_wait() -> None:
    view = WorkerView("w", (), (), 8, 0, 1000, 1000, Costs(token_ms=1.0))

    assert latency_ms(Eq3(), view, (), request("r", tokens=1, arrived=500.0), 0.0) == 5.0
