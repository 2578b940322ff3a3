from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.model_profile import Lengths
from greenroom.profiling.measures.lengths import MOST_POINTS, counts_of, lengths_of, rounded, shares_of
from greenroom.replay.traces.routing_trace import RoutingTrace

tokens = st.lists(st.integers(0, 5000), min_size=1, max_size=300)


def test_a_few_lengths() -> None:
    assert lengths_of([4, 2, 2, 8]) == Lengths(
        mean=4.0, p50=2.0, p90=8.0, p99=8.0, most=8.0, cdf=((2.0, 0.5), (4.0, 0.75), (8.0, 1.0))
    )


@given(tokens)
def test_percentiles_are_lengths_that_occur_and_rise(counts: list[int]) -> None:
    lengths = lengths_of(counts)
    assert {lengths.p50, lengths.p90, lengths.p99, lengths.most} <= set(map(float, counts))
    assert lengths.p50 <= lengths.p90 <= lengths.p99 <= lengths.most == max(counts)
    assert min(counts) - 1e-3 <= lengths.mean <= max(counts) + 1e-3
    assert np.mean(np.array(counts) <= lengths.p90) >= 0.9


@given(tokens)
def test_the_cdf_rises_to_one_and_is_true_at_each_point(counts: list[int]) -> None:
    cdf = lengths_of(counts).cdf
    assert len(cdf) <= MOST_POINTS
    assert [point for point, _ in cdf] == sorted({point for point, _ in cdf})
    assert cdf[-1] == (max(counts), 1.0)
    for length, share in cdf:
        assert share == pytest.approx(np.mean(np.array(counts) <= length), abs=1e-4)


def test_picks_are_counted_by_layer_and_none_is_lost() -> None:
    experts = np.array([[[0, 1], [2, 255]], [[1, 2], [0, 2]], [[3, 0], [1, 255]]], dtype=np.uint8)
    trace = RoutingTrace(experts, np.array([0, 2, 3]), np.array([4, 3]))
    assert counts_of(trace, [0]).tolist() == [[1, 2, 1, 0], [1, 0, 2, 0]]
    assert counts_of(trace, [0, 1]).tolist() == [[2, 2, 1, 1], [1, 1, 2, 0]]


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
def test_shares_are_one_in_sum_and_nothing_behind_a_layers_last_expert(counts: list[list[int]], last: int) -> None:
    own = np.array(counts)
    sizes = np.array([4] * (len(counts) - 1) + [last])
    own[-1, last:] = 0
    shares = shares_of(own, sizes)
    assert np.allclose(shares.sum(axis=1), 1)
    assert not shares[-1, last:].any()
    assert all(abs(sum(row) - 1) < 1e-4 for row in rounded(shares))
