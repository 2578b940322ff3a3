"""Arrival processes: rates, spreads, seeds, traces."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom_load.arrivals import Arrivals, AtOnce, Constant, Gamma, Poisson, Trace
from greenroom_load.traces import Recorded, read_trace

MANY = 20_000


def times(arrivals: Arrivals, count: int = MANY, seed: int = 1) -> list[float]:
    found = [arrival.at_s for arrival in islice(arrivals.times(Random(seed)), count)]
    return [at for at in found if at is not None]


@pytest.mark.parametrize(
    ("arrivals", "spread"),
    [(Poisson(7), 1.0), (Gamma(7, 1.0), 1.0), (Gamma(7, 0.25), 2.0), (Gamma(7, 16.0), 0.25), (Constant(7), 0.0)],
)
def test_a_process_has_the_rate_and_the_spread_that_it_says(arrivals: Arrivals, spread: float) -> None:
    gaps = np.diff(times(arrivals))

    assert 1 / gaps.mean() == pytest.approx(7, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.06, abs=1e-6)
    assert gaps.min() >= 0


def test_gaps_of_poisson_are_exponential() -> None:
    """Kolmogorov and Smirnov's distance to the distribution that is meant; 1.63/√n is its 1 % bound."""
    gaps = np.sort(np.diff(times(Poisson(3))))
    expected = 1 - np.exp(-3 * gaps)
    seen = np.arange(1, len(gaps) + 1) / len(gaps)

    assert np.abs(seen - expected).max() < 1.63 / np.sqrt(len(gaps))


def test_the_seed_alone_decides() -> None:
    assert times(Poisson(2), 50, seed=3) == times(Poisson(2), 50, seed=3)
    assert times(Poisson(2), 50, seed=3) != times(Poisson(2), 50, seed=4)


def test_at_once_waits_for_nothing() -> None:
    assert [one.at_s for one in islice(AtOnce().times(Random(0)), 3)] == [None] * 3


@given(rate=st.floats(0.01, 1e4), wanted=st.floats(0.01, 1e4), burstiness=st.floats(0.1, 10))
def test_any_process_goes_to_any_rate(rate: float, wanted: float, burstiness: float) -> None:
    recorded = tuple(Recorded(at) for at in (0.0, 1.0, 5.0))
    for arrivals in (Poisson(rate), Gamma(rate, burstiness), Constant(rate), Trace(recorded, rate)):
        assert arrivals.at_rate(wanted).rate == pytest.approx(wanted)


def test_a_trace_is_replayed_with_its_lengths() -> None:
    trace = Trace((Recorded(0.0, 5, 6), Recorded(2.0, 7, 8)), time_scale=0.5)

    assert [(one.at_s, one.input_tokens, one.output_tokens) for one in trace.times(Random(0))] == [(0, 5, 6), (1, 7, 8)]
    assert trace.rate == 1.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    for make in (Poisson, Constant, lambda rate: Gamma(rate, 1.0)):
        with pytest.raises(InvalidConfig, match="request_rate"):
            make(rate)


def test_a_trace_of_one_moment_has_no_rate_to_scale() -> None:
    with pytest.raises(InvalidConfig, match="same time"):
        Trace((Recorded(0.0), Recorded(0.0))).at_rate(2)


def csv(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = csv(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:15:46.6805900,374,44",
        "",
        "2023-11-16 18:15:51.9951690,20,1",
    )

    first, second, third = read_trace(path)

    assert first == Recorded(0.0, 374, 44)
    assert second.input_tokens == 396
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert third.at_s - second.at_s == pytest.approx(1.0, abs=1e-5)


def test_seconds_time_zones_and_missing_lengths_are_read(tmp_path: Path) -> None:
    assert read_trace(csv(tmp_path, "Timestamp,Request tokens", "10,5", "12.5,")) == (
        Recorded(0.0, 5),
        Recorded(2.5, None),
    )
    zones = csv(tmp_path, "TIMESTAMP", "2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:01.009930+02:00")
    assert [one.at_s for one in read_trace(zones)] == [0.0, pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("when,ContextTokens", "1,2"), "columns TIMESTAMP"),
        (("TIMESTAMP", "soon"), "line 2.*'soon'"),
        (("TIMESTAMP,ContextTokens", "1,2", "2,-3"), "line 3"),
        (("TIMESTAMP,ContextTokens", "1"), "line 2"),
        (("TIMESTAMP,ContextTokens", "nan,1"), "line 2"),
        (("TIMESTAMP",), "has no requests"),
        ((), "columns TIMESTAMP"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        read_trace(csv(tmp_path, *lines))
