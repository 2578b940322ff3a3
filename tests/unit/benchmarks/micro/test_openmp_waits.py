from __future__ import annotations

from benchmarks.micro.openmp_waits import WAITS, spreads


def test_ratios_are_of_the_same_round() -> None:
    base, own = [{"one": 10.0}, {"one": 20.0}, {"one": 5.0}], [{"one": 11.0}, {"one": 24.0}, {"one": 5.0}]
    found = spreads(own, base)["one"]
    assert found["rate"] == {"median": 11.0, "min": 5.0, "max": 24.0}
    assert found["over"] == {"median": 1.1, "min": 1.0, "max": 1.2}


def test_the_first_way_is_the_one_that_others_are_compared_with() -> None:
    assert next(iter(WAITS)) == "as it comes"
