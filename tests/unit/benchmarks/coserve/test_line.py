"""Rates that are still served, and lines that never stop."""

from __future__ import annotations

import pytest

from benchmarks.coserve import line
from benchmarks.coserve.line import arriving, highest_rate, p99_s
from benchmarks.coserve.machines import HERE
from greenroom.coe.simulation.simulate import Served


@pytest.mark.parametrize("start", [1.0, 9.0, 40.0])
def test_the_highest_rate_is_found_from_below_and_from_above(start: float) -> None:
    found = highest_rate(lambda rate: rate <= 17.3, start, 0.01)
    assert found <= 17.3 <= found * 1.01


def test_no_rate_is_tried_twice_as_far_as_it_matters() -> None:
    tried: list[float] = []

    def serves(rate: float) -> bool:
        tried.append(rate)
        return rate <= 10.0

    highest_rate(serves, 9.5, 0.02)
    assert len(tried) == len(set(tried)) <= 7


def test_gaps_are_those_of_the_seed_at_any_rate() -> None:
    slow, fast = (arriving([(0,)] * 2000, rate, 3) for rate in (5.0, 10.0))
    assert [way.arrives_ms for way in slow] == pytest.approx([2 * way.arrives_ms for way in fast])
    assert slow[-1].arrives_ms == pytest.approx(2000 / 5 * 1000, rel=0.1)


def test_only_the_second_half_counts() -> None:
    served = Served((9000.0,) * 100 + (1000.0,) * 99 + (5000.0,), 1.0, 0, 0.0, 0.0, 1)
    assert p99_s(served) == 1.0
    growing = Served((0.0,) * 100 + tuple(1000.0 * at for at in range(100)), 1.0, 0, 0.0, 0.0, 1)
    assert p99_s(growing) == 98.0


def test_the_best_simple_system_is_that_of_the_least_p99() -> None:
    at = {name: 10.0 + place for place, name in enumerate(line.SYSTEMS)} | {"pull": 3.0, "one memory, LRU": 6.0}
    runs = [{"rates": {"CoServe": 10.0, line.AS_PROFILED: 8.0, "pull": 15.0}, "p99_s": at}] * 2
    found = line.summary(HERE, line.Limit(20, 60), {}, runs)
    assert found["best_simple"] == "one memory, LRU"
    assert found["p99_over_simple"]["mean"] == pytest.approx(0.5)
    assert found["rate_over_coserve"]["mean"] == pytest.approx(1.5)
