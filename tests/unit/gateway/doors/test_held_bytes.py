"""Bytes of inputs: what is held is what was added and not released, and one call is never kept out by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.gateway.doors.held_bytes import HeldBytes
from greenroom.gateway.errors import ApiError

MOST = 100


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150) | st.none()), max_size=40))
def test_the_total_is_that_of_all_calls(steps: list[tuple[int, int | None]]) -> None:
    """``None``: the call ends."""
    held = HeldBytes(MOST)
    calls = [held.of_call() for _ in range(4)]
    expected = [0] * 4
    for which, size in steps:
        others = sum(expected) - expected[which]
        if size is None:
            calls[which].release()
            expected[which] = 0
        elif others and sum(expected) + size > MOST:
            with pytest.raises(ApiError, match=f"inputs of {sum(expected)} bytes") as caught:
                calls[which].add(size)
            assert (caught.value.status, caught.value.code) == (429, "saturated")
        else:
            calls[which].add(size)
            expected[which] += size
        assert [call.size for call in calls] == expected
        assert held.total == sum(expected)
