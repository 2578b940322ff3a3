"""The search for the saturating rate, and the rule that judges a rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom_load.figures import figures
from greenroom_load.sweep import Rule, Search, parse_rates
from greenroom_load.targets import Targets
from tests.unit.loadgen.fakes import failed, outcome, record


def searched(search: Search, limit: float) -> dict[float, bool]:
    """What is tried on a server that sustains up to ``limit``."""
    tried: dict[float, bool] = {}
    while (rate := search.next_rate(tried)) is not None:
        assert rate not in tried
        assert len(tried) < 60
        tried[rate] = rate <= limit
    return tried


@given(limit=st.floats(0.01, 5_000), start=st.floats(0.1, 50), precision=st.floats(0.02, 0.5))
def test_the_search_closes_in_on_the_limit(limit: float, start: float, precision: float) -> None:
    search = Search(start=start, most=1000, precision=precision)
    tried = searched(search, limit)
    good = [rate for rate, sustained in tried.items() if sustained]
    bad = [rate for rate, sustained in tried.items() if not sustained]

    assert len(tried) <= 24 + math.log2(1 / precision)
    if limit >= 1000:
        assert max(good) == 1000
        assert not bad
    elif good:
        assert max(good) <= limit <= max(good) * (1 + precision)
    else:
        assert limit < start / 500


def test_the_search_doubles_then_halves_the_interval() -> None:
    tried = list(searched(Search(start=1, most=1000, precision=0.2), limit=5))

    assert tried[:4] == [1, 2, 4, 8]
    assert tried[4] == pytest.approx(math.sqrt(32))


def test_a_noisy_verdict_does_not_keep_the_search_going() -> None:
    """2 was sustained though 1.5 was not: only what lies below the lowest failure counts."""
    search = Search(start=1, precision=0.2)

    assert search.next_rate({1: True, 2: True, 1.5: False}) == pytest.approx(math.sqrt(1.5))


def test_a_steady_run_is_sustained() -> None:
    assert Rule().broken(figures(outcome(*(record(n, at=n * 0.1) for n in range(200))))) == []


def test_a_growing_queue_is_not() -> None:
    """Ten requests a second, of which the server answers eight."""
    records = [record(n, at=n * 0.1, first_s=n * 0.125 + 0.1, end_s=n * 0.125 + 0.2) for n in range(300)]

    assert Rule().broken(figures(outcome(*records))) == ["119 finished of 150 in the second half"]


def test_failures_and_missed_goodput_are_not() -> None:
    records = [record(n, at=n * 0.1) for n in range(97)]
    records += [failed(97 + n, at=9.7 + n * 0.1) for n in range(3)]
    found = figures(outcome(*records), Targets(ttft_ms=50))

    assert Rule(least_finished=0.5).broken(found) == ["3.0% failed", "goodput 0%"]
    assert Rule(most_failed=0.03, least_finished=0.5, least_good=0).broken(found) == []


def test_a_run_in_which_nothing_completed_is_not() -> None:
    assert Rule().broken(figures(outcome(failed(0)))) == ["not one request completed"]


def test_two_requests_are_no_queue() -> None:
    """Of four requests the last two end behind the last send."""
    assert Rule().broken(figures(outcome(*(record(n, end_s=n + 1.5) for n in range(4))))) == []


@pytest.mark.parametrize("text", ["", "x", "0", "1,-2", "inf", "1,nan"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="rates"):
        parse_rates(text)


def test_rates_are_put_in_order() -> None:
    assert parse_rates("4, 1,2,4") == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("field", "given"),
    [("start_rate", {"start": 0}), ("max_rate", {"start": 5, "most": 4}), ("precision", {"precision": 0})],
)
def test_a_search_that_can_not_end_is_refused(field: str, given: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match=field):
        Search(**given)
