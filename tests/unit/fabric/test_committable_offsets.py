"""What may be committed is the contiguous prefix of what is finished, whatever the order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fabric.committable_offsets import PrefixTracker


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40), st.randoms())
def test_the_position_is_before_the_first_that_is_not_finished(
    begin: int, steps: list[tuple[int, bool]], choose: random.Random
) -> None:
    """Offsets with gaps; now and then one of the open ones is finished. Against the definition, spelt out."""
    tracker = PrefixTracker(begin)
    started: list[int] = []
    finished: set[int] = set()
    offset = begin - 1
    last = tracker.position
    for gap, finish in steps:
        if finish and set(started) - finished:
            chosen = choose.choice(sorted(set(started) - finished))
            tracker.finish(chosen)
            finished.add(chosen)
        else:
            offset += gap
            tracker.start(offset)
            started.append(offset)
        unfinished = [one for one in started if one not in finished]
        expected = min(unfinished) if unfinished else max([begin, *(one + 1 for one in started)])
        assert tracker.position == expected
        assert tracker.position >= last
        assert tracker.open == len(unfinished)
        assert tracker.span == max([begin, *(one + 1 for one in started)]) - expected
        last = tracker.position


def test_an_offset_is_started_once_in_order_and_finished_once() -> None:
    tracker = PrefixTracker(5)
    with pytest.raises(ValueError, match="was read already"):
        tracker.start(4)
    tracker.start(7)
    with pytest.raises(ValueError, match="was read already"):
        tracker.start(7)
    with pytest.raises(ValueError, match="not open"):
        tracker.finish(5)
    tracker.finish(7)
    with pytest.raises(ValueError, match="not open"):
        tracker.finish(7)
    assert tracker.position == 8
