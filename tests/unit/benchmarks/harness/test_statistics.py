from __future__ import annotations

import pytest

from benchmarks.harness.reporting.statistics import geometric, interval, over_seeds, percentile
from benchmarks.harness.reporting.tables import plus_minus


def test_an_interval_is_students() -> None:
    assert interval([4.0]) == {"mean": 4.0, "within": 0.0}
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3.0
    assert found["within"] == pytest.approx(2.78 * 1.5811 / 5**0.5, rel=1e-3)


def test_a_ratio_is_seed_by_seed_and_its_interval_shrinks_where_seeds_agree() -> None:
    agreed = geometric([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert agreed == pytest.approx({"mean": 2.0, "within": 0.0, "low": 2.0, "high": 2.0, "pairs": 3}, abs=1e-9)
    apart = geometric([1.0, 4.0], [1.0, 1.0])
    assert apart is not None
    assert apart["mean"] == pytest.approx(2.0)
    assert apart["low"] * apart["high"] == pytest.approx(4.0)  # as far below as above
    assert apart["low"] < 1.0 < 4.0 < apart["high"]


@pytest.mark.parametrize("theirs", [[1.0, 0.0], [1.0, None]])
def test_where_one_of_a_pair_has_nothing_there_is_no_ratio(theirs: list[float | None]) -> None:
    assert geometric([1.0, 1.0], theirs) is None
    assert plus_minus(geometric([1.0, 1.0], theirs)) == "-"


def test_figures_over_seeds_go_as_deep_as_the_summaries() -> None:
    runs = [{"a": 1.0, "b": {"c": {"d": 2.0}}, "e": None}, {"a": 3.0, "b": {"c": {"d": 2.0}}, "e": None}]
    found = over_seeds(runs)
    assert found["a"]["mean"] == 2.0
    assert found["b"]["c"]["d"] == {"mean": 2.0, "within": 0.0}
    assert found["e"] is None


def test_a_percentile_is_the_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
