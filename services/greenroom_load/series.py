"""A run over time, and how its latencies are distributed: what the plots are drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom_load.figures import token_times
from greenroom_load.reply_record import Record

_WIDTHS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_MOST_BINS = 120
_LEAST_BINS = 20
_REQUESTS_A_BIN = 5
_STEPS = 200
Floats = NDArray[np.float64]


def bin_width(duration_s: float, requests: int) -> float:
    """The narrowest round width with which the run has at most 120 bins, and fewer where it has few requests: about
    one for every five, but at least twenty."""
    most = min(_MOST_BINS, max(_LEAST_BINS, requests // _REQUESTS_A_BIN))
    return next((width for width in _WIDTHS_S if duration_s <= width * most), duration_s / most)


def series(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """By bins of time, in columns.

    A request's TTFT belongs to the bin in which it was to be sent, a gap between tokens to the bin in which it ended,
    so a stall shows when it happened. ``in_flight`` is the mean over the bin. Columns of latencies are None where a bin
    has no samples.
    """
    width = bin_width(duration_s, len(records))
    count = max(1, math.ceil(duration_s / width + 1e-9))
    ok = [record for record in records if record.ok]
    ttft = [(record.intended_s, value) for record in ok if (value := record.ttft_intended_s) is not None]
    gaps: list[tuple[Floats, Floats]] = []
    for record in ok:
        if record.first_s is not None and record.gaps_s:
            own = np.asarray(record.gaps_s)
            gaps.append((record.first_s + np.cumsum(own), own))
    ends = [record.end_s for record in records if record.end_s is not None]
    failed = [record.end_s if record.end_s is not None else record.intended_s for record in records if not record.ok]
    sent_at = np.array([at for at, _ in ttft])
    gap_at = np.concatenate([at for at, _ in gaps]) if gaps else np.zeros(0)
    gap = np.concatenate([own for _, own in gaps]) if gaps else np.zeros(0)
    ttft_p50, ttft_p99 = _percentiles(sent_at, np.array([value for _, value in ttft]), width, count)
    itl_p50, itl_p99 = _percentiles(gap_at, gap, width, count)
    return {
        "bin_s": width,
        "start_s": [index * width for index in range(count)],
        "intended": _counts([record.intended_s for record in records], width, count),
        "ended": _counts(ends, width, count),
        "failed": _counts(failed, width, count),
        "tokens": _counts(token_times(ok), width, count),
        "in_flight": _in_flight(records, width, count),
        "ttft_p50_ms": ttft_p50,
        "ttft_p99_ms": ttft_p99,
        "itl_p50_ms": itl_p50,
        "itl_p99_ms": itl_p99,
    }


def distributions(records: Sequence[Record]) -> dict[str, Any]:
    """Quantiles of each latency from 0 to 1 in steps of 1/200, in milliseconds; those without samples are left out."""
    ok = [record for record in records if record.ok]
    values: dict[str, list[float | None]] = {
        "ttft_ms": [record.ttft_s for record in ok],
        "ttft_intended_ms": [record.ttft_intended_s for record in ok],
        "tpot_ms": [record.tpot_s for record in ok],
        "itl_ms": [gap for record in ok for gap in record.gaps_s],
        "e2el_ms": [record.e2e_s for record in ok],
        "e2el_intended_ms": [record.e2e_intended_s for record in ok],
    }
    found: dict[str, Any] = {"steps": _STEPS}
    for name, own in values.items():
        known = np.array([value for value in own if value is not None], np.float64)
        if len(known):
            quantiles = np.quantile(known * 1e3, np.linspace(0, 1, _STEPS + 1))
            found[name] = [round(float(value), 4) for value in quantiles]
    return found


def _bins(at: Floats, width: float, count: int) -> NDArray[np.int64]:
    return np.clip((at / width).astype(np.int64), 0, count - 1)


def _counts(at: Sequence[float] | Floats, width: float, count: int) -> list[int]:
    return [int(value) for value in np.bincount(_bins(np.asarray(at, np.float64), width, count), minlength=count)]


def _percentiles(at: Floats, seconds: Floats, width: float, count: int) -> tuple[list[Any], list[Any]]:
    middle: list[Any] = [None] * count
    high: list[Any] = [None] * count
    if not len(at):
        return middle, high
    bins = _bins(at, width, count)
    order = np.argsort(bins, kind="stable")
    places, firsts = np.unique(bins[order], return_index=True)
    for place, own in zip(places, np.split(seconds[order] * 1e3, firsts[1:]), strict=True):
        middle[place], high[place] = (round(float(np.percentile(own, level)), 4) for level in (50, 99))
    return middle, high


def _in_flight(records: Sequence[Record], width: float, count: int) -> list[float]:
    busy = np.zeros(count)
    for record in records:
        if record.sent_s is None or record.end_s is None:
            continue
        first, last = min(count - 1, int(record.sent_s / width)), min(count - 1, int(record.end_s / width))
        for index in range(first, last + 1):
            overlap = min(record.end_s, (index + 1) * width) - max(record.sent_s, index * width)
            busy[index] += max(0.0, overlap)
    return [round(float(value), 4) for value in busy / width]
