"""Through how many slots a layer passes what it misses."""

from __future__ import annotations

import pytest

from greenroom.policies.base.streaming import stream_slots


@pytest.mark.parametrize(("moving", "slots", "expected"), [(1, 10, 2), (3, 10, 4), (1, 480, 10), (20, 480, 21)])
def test_as_many_as_keep_the_links_busy_or_a_share_of_all(moving: int, slots: int, expected: int) -> None:
    assert stream_slots(moving, slots) == expected
