"""A scheduler's pools as Prometheus metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.scheduler.accuracy import RATIOS, EstimateErrors
from greenroom.scheduler.pool_state import Role
from greenroom.scheduler.service import SchedulerService


class SchedulerCollector(Collector):
    """Reads the pools when it is scraped."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        active = GaugeMetricFamily("greenroom_scheduler_active", "1 where this process holds the pool", labels=["pool"])
        waiting = GaugeMetricFamily("greenroom_scheduler_waiting", "Requests that are on no worker", labels=["pool"])
        placed = GaugeMetricFamily("greenroom_scheduler_placed", "Requests that are on a worker", labels=["pool"])
        oldest = GaugeMetricFamily(
            "greenroom_scheduler_oldest_wait_seconds", "Of the first that waits", labels=["pool"]
        )
        workers = GaugeMetricFamily("greenroom_scheduler_workers", "Workers with a lease", labels=["pool"])
        unfinished = GaugeMetricFamily(
            "greenroom_scheduler_uncommitted", "Records of tasks read and not finished", labels=["pool"]
        )
        events = CounterMetricFamily("greenroom_scheduler_events", "What happened, by kind", labels=["pool", "event"])
        ratios = HistogramMetricFamily(
            "greenroom_scheduler_latency_ratio",
            "Real latency over the one that was estimated when the request was placed",
            labels=["pool", "estimator"],
        )
        wrong = CounterMetricFamily(
            "greenroom_scheduler_latency_error_seconds",
            "Sum of how far estimated latencies were from the real ones",
            labels=["pool", "estimator"],
        )
        for number, runner in self._service.runners.items():
            pool, label = runner.pool, [str(number)]
            depth = pool.depth
            active.add_metric(label, float(pool.role is Role.ACTIVE))
            waiting.add_metric(label, depth.waiting)
            placed.add_metric(label, depth.running)
            oldest.add_metric(label, depth.wait_ms / 1000)
            workers.add_metric(label, len(pool.workers))
            unfinished.add_metric(label, pool.tracker.open)
            for event, count in sorted(pool.counts.items()):
                events.add_metric([*label, event], count)
            for estimator, errors in sorted(pool.accuracy.by_estimator.items()):
                ratios.add_metric([*label, estimator], _buckets(errors), sum_value=errors.ratio)
                wrong.add_metric([*label, estimator], errors.absolute_ms / 1000)
        yield from (active, waiting, placed, oldest, workers, unfinished, events, ratios, wrong)


def _buckets(errors: EstimateErrors) -> list[tuple[str, float]]:
    ends = [*(str(ratio) for ratio in RATIOS), "+Inf"]
    return list(zip(ends, map(float, itertools.accumulate(errors.classes)), strict=True))
