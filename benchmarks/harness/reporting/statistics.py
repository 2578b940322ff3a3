"""What the values of several rounds, seeds or requests come to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_T95 = (
    0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10,
    2.09, 2.09, 2.08, 2.07, 2.07, 2.06,
)  # fmt: skip
"""Student's t for 95 % by degrees of freedom; 1.96 beyond."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


def spread_json(found: Spread | None, digits: int | None = None) -> dict[str, float] | None:
    """``median``, ``min`` and ``max``, rounded to so many digits; None stays None."""
    if found is None:
        return None
    values = {"median": found.median, "min": found.least, "max": found.most}
    return values if digits is None else {name: round(value, digits) for name, value in values.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def interval(values: Sequence[float]) -> dict[str, float]:
    """``mean``, and ``within``: half the width of its 95 % interval (Student's), 0 of a single value."""
    t = _T95[len(values) - 1] if len(values) <= len(_T95) else 1.96
    return {"mean": statistics.fmean(values), "within": t * deviation(values) / math.sqrt(len(values))}


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure of several seeds' summaries as an interval; dictionaries go on within."""
    found: dict[str, Any] = {}
    for key in runs[0]:
        values = [run.get(key) for run in runs]
        if all(isinstance(value, Mapping) for value in values):
            common = [value for value in values if value]
            found[key] = over_seeds(common) if common else {}
        else:
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            found[key] = interval(numbers) if numbers else None
    return found


def geometric(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, float] | None:
    """Geometric mean of ours over theirs, pair by pair (the same seed, or the same round).

    ``low`` and ``high`` bound its 95 % interval (Student's, of the logarithms); ``within`` is half the interval's
    width. None where a pair lacks a value or has one that is not positive: a ratio then says nothing.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not pairs or len(pairs) < len(ours) or any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    found = interval([math.log(a / b) for a, b in pairs])
    low, high = (math.exp(found["mean"] + side * found["within"]) for side in (-1, 1))
    return {"mean": math.exp(found["mean"]), "within": (high - low) / 2, "low": low, "high": high, "pairs": len(pairs)}
