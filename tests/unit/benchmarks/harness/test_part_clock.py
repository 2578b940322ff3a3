from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.harness.part_clock import PartClock


def ticking(*times: float) -> PartClock:
    moments: Iterator[float] = iter(times)
    return PartClock(lambda: next(moments))


def test_an_inner_part_stops_the_outer_ones_clock() -> None:
    clock = ticking(0, 1, 3, 7, 12)
    clock.enter("outer")  # 0
    clock.enter("inner")  # 1
    clock.leave()  # 3
    clock.enter("inner")  # 7
    clock.leave()  # 12
    assert clock.seconds == {"outer": 1 + 4, "inner": 2 + 5}


def test_time_outside_of_all_parts_counts_for_none() -> None:
    clock = ticking(0, 2, 10, 11)
    clock.enter("a")
    clock.leave()
    clock.enter("a")
    clock.leave()
    assert clock.seconds == {"a": 3}


def test_a_part_within_itself_counts_once() -> None:
    clock = ticking(0, 1, 2, 4)
    clock.enter("a")
    clock.enter("a")
    clock.leave()
    clock.leave()
    assert clock.seconds == {"a": 4}


def test_a_part_ends_where_it_raises() -> None:
    clock = ticking(0, 1, 2, 3)
    with pytest.raises(RuntimeError), clock.part("a"):
        raise RuntimeError
    with clock.part("b"):
        pass
    assert clock.seconds == {"a": 1, "b": 1}
