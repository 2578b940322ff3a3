"""From what became of requests to the figures that are reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.emoe.simulate import Served

_T95 = (
    0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10,
    2.09, 2.09, 2.08, 2.07, 2.07, 2.06,
)  # fmt: skip
"""Student's t for 95 % by degrees of freedom; 1.96 beyond."""


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds with half the width of its 95 % interval; a single value has none."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "within": 0.0}
    t = _T95[len(values) - 1] if len(values) <= len(_T95) else 1.96
    return {"mean": mean, "within": t * statistics.stdev(values) / math.sqrt(len(values))}


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """One run. ``goodput``: requests a second that ended within their SLO, over the time in which requests came.

    The mean latency is of those that were answered; ``given_up`` are the others.
    """
    seconds = max(one.job.at_ms for one in served) / 1e3 or 1.0
    latencies = [one.latency_ms for one in served if one.latency_ms is not None]
    tasks = sorted({one.job.task for one in served})
    by_task = {task: _of_task([one for one in served if one.job.task == task], seconds) for task in tasks}
    waits = [one.placed_ms - one.job.at_ms for one in served if one.placed_ms is not None]
    return {
        "requests": len(served),
        "rate": len(served) / seconds,
        "mean_latency_ms": statistics.fmean(latencies) if latencies else None,
        "p99_latency_ms": percentile(latencies, 0.99) if latencies else None,
        "longest_wait_ms": max(waits, default=0.0),
        "attainment": sum(one.in_time for one in served) / len(served),
        "goodput": sum(one.in_time for one in served) / seconds,
        "given_up": len(served) - len(latencies),
        "by_task": by_task,
        "estimates": estimate_errors(served),
    }


def _of_task(served: Sequence[Served], seconds: float) -> dict[str, float | None]:
    latencies = [one.latency_ms for one in served if one.latency_ms is not None]
    return {
        "attainment": sum(one.in_time for one in served) / len(served),
        "goodput": sum(one.in_time for one in served) / seconds,
        "mean_latency_ms": statistics.fmean(latencies) if latencies else None,
    }


def estimate_errors(served: Sequence[Served]) -> dict[str, dict[str, float]]:
    """By estimator: (estimate − truth) / truth of the time from being placed to the end: its median, and the mean of
    its size. What a request waited before is known when it is placed and would only flatter them."""
    errors: dict[str, list[float]] = {}
    for one in served:
        if one.latency_ms is None or one.placed_ms is None:
            continue
        waited = one.placed_ms - one.job.at_ms
        for name, expected in (one.estimates or {}).items():
            truth = one.latency_ms - waited
            errors.setdefault(name, []).append((expected - waited - truth) / truth)
    return {
        name: {"median": statistics.median(values), "mean_size": statistics.fmean(map(abs, values)), "of": len(values)}
        for name, values in errors.items()
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


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
    """Ours over theirs, pair by pair (the same seed, or the same round): the geometric mean, its 95 % interval from
    ``low`` to ``high`` (Student's, of the logarithms), and ``within``, half of that interval's width. None where one of
    a pair has nothing, since a ratio then says nothing.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not pairs or len(pairs) < len(ours) or any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    found = interval([math.log(a / b) for a, b in pairs])
    low, high = (math.exp(found["mean"] + side * found["within"]) for side in (-1, 1))
    return {"mean": math.exp(found["mean"]), "within": (high - low) / 2, "low": low, "high": high, "pairs": len(pairs)}


def spread(found: Mapping[str, float] | None, scale: float = 1.0) -> str:
    """For people."""
    return "-" if found is None else f"{scale * found['mean']:.2f} ± {scale * found['within']:.2f}"
