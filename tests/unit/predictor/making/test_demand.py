"""What is asked for, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.making.demand import Demand


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(0, 20)), max_size=40), st.floats(0.1, 30))
def test_what_was_asked_for_lapses_after_the_last_time(asked: list[tuple[str, float]], within_s: float) -> None:
    demand, last, now = Demand(within_s), dict[str, float](), 0.0
    for name, pause in asked:
        now += pause
        long_ago = name not in last or now - last[name] >= within_s
        assert demand.ask((name, "kind"), now) == long_ago
        last[name] = now
        for one in "xyz":
            assert demand.holds((one, "kind"), now) == (one in last and now - last[one] < within_s)
    lapsed = {name for name, _ in demand.lapse(now)}
    assert lapsed == {name for name, then in last.items() if now - then >= within_s}
    assert demand.lapse(now) == []


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    demand = Demand(10.0, most=2)
    assert all(demand.ask((model, "kind"), 0.0) for model in "ab")
    assert not demand.ask(("c", "kind"), 9.0)
    assert not demand.holds(("c", "kind"), 9.0)
    assert demand.ask(("c", "kind"), 10.0), "the others have lapsed"
    assert len(demand) == 1
