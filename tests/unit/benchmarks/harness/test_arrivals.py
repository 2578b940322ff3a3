from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.harness.inputs.arrivals import burst_times

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{minute:02}:{second:02}.5,10,10\n" for minute in range(3) for second in (0, 1, 2, 30)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize("recorded", [False, True])
def test_arrivals_have_the_wanted_rate_and_the_same_shape_at_every_rate(trace: Path, recorded: bool) -> None:
    of = trace if recorded else None
    slow, fast = burst_times(9, 0.5, seed=3, trace=of), burst_times(9, 2.0, seed=3, trace=of)
    assert slow[0] == 0
    assert slow == sorted(slow)
    assert slow[-1] == pytest.approx(8 / 0.5)
    assert fast == pytest.approx([at / 4 for at in slow])
    assert burst_times(9, 0.5, seed=3, trace=of) == slow


def test_drawn_arrivals_are_in_bursts() -> None:
    arrivals = burst_times(2000, 1.0, seed=0, trace=None)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert statistics.stdev(gaps) > 1.3 * statistics.fmean(gaps), "Poisson has 1"


def test_recorded_gaps_are_kept(trace: Path) -> None:
    arrivals = burst_times(5, 1.0, seed=1, trace=trace)
    gaps = sorted(later - earlier for earlier, later in pairwise(arrivals))
    assert gaps[-1] > 10 * gaps[0], "seconds within a minute's burst, half a minute between"
