"""Between the RPCs' messages and our types."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fabric.wire import from_share
from greenroom.v1 import worker_pb2


@given(st.integers(0, 10**6))
def test_a_share_comes_over_as_it_was_said(millionths: int) -> None:
    share = millionths / 10**6
    assert from_share(worker_pb2.RunResult(approximated=share).approximated) == share


@pytest.mark.parametrize(
    ("said", "share"), [(math.nan, 0.0), (-1.0, 0.0), (-math.inf, 0.0), (1.5, 1.0), (math.inf, 1.0), (-0.0, 0.0)]
)
def test_a_share_out_of_range_is_read_as_the_nearest_one(said: float, share: float) -> None:
    assert from_share(worker_pb2.RunResult(approximated=said).approximated) == share
