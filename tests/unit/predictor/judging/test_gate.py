"""Which of what was learnt may be served."""

from __future__ import annotations

import math
from typing import Any

import pytest

from greenroom.predictor.judging.gate import why_withheld


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
