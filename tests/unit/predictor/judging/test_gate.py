"""Which predictors are learnt, and which of what was learnt may be served."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.judging.gate import why_withheld
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


def test_what_is_forgotten_is_new() -> None:
    demand = Demand(10)
    assert demand.ask(("m", "a"), 0)
    demand.forget(("m", "a"))
    assert not demand.holds(("m", "a"), 0)
    assert demand.ask(("m", "a"), 1)


@pytest.mark.parametrize(
    ("report", "passes"),
    [
        ({"overlap": 0.7, "popularity_overlap": 0.6}, True),
        ({"overlap": 0.7, "popularity_overlap": 0.705}, True),
        ({"overlap": 0.7, "popularity_overlap": 0.72}, False),
        ({"overlap": 0.7, "popularity_overlap": 0.6, "served_overlap": 0.705}, True),
        ({"overlap": 0.7, "popularity_overlap": 0.6, "served_overlap": 0.72}, False),
        ({"overlap": math.nan, "popularity_overlap": 0.6}, False),
        ({"overlap": 0.7, "popularity_overlap": math.nan}, False),
        ({"overlap": 0.7}, False),
        ({"popularity_overlap": 0.7}, False),
        ({"overlap": "much", "popularity_overlap": 0.6}, False),
        ({}, False),
    ],
)
def test_what_may_be_served(report: dict[str, Any], passes: bool) -> None:
    assert (why_withheld(report, 0.01) == "") == passes


def test_it_says_what_it_is_worse_than() -> None:
    assert why_withheld({"overlap": 0.5, "popularity_overlap": 0.6}, 0.01).endswith("0.500, that of popularity 0.600")
    report = {"overlap": 0.5, "popularity_overlap": 0.5, "served_overlap": 0.6}
    assert "what is served 0.600" in why_withheld(report, 0.01)
