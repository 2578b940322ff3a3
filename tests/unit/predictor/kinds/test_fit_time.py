from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.kinds.fit_time import FitTime


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    seconds=st.floats(0, 1e4),
    parts=st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_parts_that_end_when_told_take_the_whole_time_and_no_more(
    seconds: float, parts: list[tuple[float, float]]
) -> None:
    """Each part uses a share of what it is given; the last one may use all that is left."""
    clock = Clock()
    time_left = FitTime(seconds, sum(weight for weight, _ in parts), clock)
    for number, (weight, share) in enumerate(parts):
        began, left = clock.now, sum(own for own, _ in parts[number:])
        own = (seconds - began) * weight / left
        time_left.begin(weight)
        clock.now = began + 0.99 * own
        assert not time_left.is_up or own < 1e-6
        clock.now = began + own * (1 + 1e-6) + 1e-9
        assert time_left.is_up
        clock.now = began + share * own
    assert clock.now <= seconds * (1 + 1e-6)


def test_without_a_limit_time_is_never_up() -> None:
    clock = Clock()
    time_left = FitTime(None, 3, clock)
    assert not time_left.is_up
    time_left.begin()
    clock.now = 1e9
    assert not time_left.is_up


def test_what_begins_too_late_is_over_at_once() -> None:
    clock = Clock()
    time_left = FitTime(10, 2, clock)
    time_left.begin()
    clock.now = 11
    time_left.begin()
    assert time_left.is_up
