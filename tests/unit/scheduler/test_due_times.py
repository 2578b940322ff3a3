"""When a pool looks at its requests again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from greenroom.scheduler.due_times import DueTimes

NAMES = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("at"), NAMES, st.integers(0, 20)),
        st.tuples(st.just("forget"), NAMES, st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 20)),
    ),
    max_size=300,
)


@given(STEPS)
def test_it_is_a_table_of_the_earliest_times(steps: list[tuple[str, str, int]]) -> None:
    due, plain = DueTimes(), dict[str, int]()
    for what, name, time in steps:
        if what == "at":
            due.at(name, time)
            plain[name] = min(time, plain.get(name, time))
        elif what == "forget":
            due.forget(name)
            plain.pop(name, None)
        else:
            late = {one for one, when in plain.items() if when <= time}
            found = due.take(time)
            assert (set(found), len(found)) == (late, len(late))
            for one in late:
                del plain[one]
        assert len(due) == len(plain)
        assert all(due.of(one) == plain.get(one, math.inf) for one in "abcdef")


def test_what_was_set_and_forgotten_takes_no_room_for_long() -> None:
    due = DueTimes()
    for number in range(10_000):
        due.at(str(number), 1e9 - number)
        due.at(str(number), 1e8 - number)
        if number >= 10:
            due.forget(str(number - 10))
    assert len(due) == 10
    assert len(due._heap) < 100


def test_never_is_no_time() -> None:
    due = DueTimes()
    due.at("a", math.inf)
    assert (len(due), due.take(1e300)) == (0, [])
