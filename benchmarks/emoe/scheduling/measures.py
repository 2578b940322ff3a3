"""From the simulated or real requests to the figures that are reported."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.emoe.scheduling.simulator import Served
from benchmarks.harness.reporting.statistics import percentile


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """One run. ``goodput``: requests a second that ended within their SLO, over the time in which requests came.

    The mean latency is of answered requests; ``given_up`` are the others.
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
    """By estimator (estimate − truth) / truth: its median, and the mean of its size.

    Of the time from being placed to the end. The wait before is known when a request is placed and would only flatter.
    """
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
