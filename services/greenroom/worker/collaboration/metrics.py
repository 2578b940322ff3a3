"""A collaboration's counters as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.coe.serving.runtime import CollaborationRuntime

PREFIX = "greenroom_coe_"
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_LABELS = ("scheduling", "policy")


class CollaborationCollector(Collector):
    """To be registered with a CollectorRegistry. Every metric has the labels ``scheduling`` and ``policy``."""

    def __init__(self, runtime: CollaborationRuntime) -> None:
        self._runtime = runtime
        selection = runtime.config.selection
        self._labels = (selection.scheduling_spelt, selection.policy_spelt)

    def collect(self) -> Iterable[Metric]:
        runtime, counters = self._runtime, self._runtime.engine.counters
        memories = [memory.counters for memory in runtime.memories]
        for name, text, value in (
            ("uses", "Batches that an expert was held for.", sum(one.uses for one in memories)),
            ("hits", "Of these, those that it was not loaded for.", sum(one.hits for one in memories)),
            ("loads", "Experts loaded after the first fill.", sum(one.loads for one in memories)),
            ("loaded_bytes", "Their bytes.", sum(one.bytes_loaded for one in memories)),
            ("failed_loads", "Experts that could not be read.", sum(one.failed_loads for one in memories)),
            ("evictions", "Experts that left memory.", sum(one.evictions for one in memories)),
            ("moved_bytes", "Moved within memory, to make room.", sum(one.bytes_moved for one in memories)),
            ("link_seconds", "Time in which the disk was read.", runtime.link.busy_seconds),
            ("requests", "Requests taken.", counters.requests),
            ("requests_ended", "Requests whose outcome was told.", counters.ended),
            ("requests_failed", "Of these, those without an answer.", counters.failed),
            ("stages", "Stages given to executors.", counters.stages),
            ("stage_wait_seconds", "Time that stages waited for their expert and an executor.", counters.stage_wait_s),
            (
                "stage_run_seconds",
                "Time that stages were computed, each for as long as its batch.",
                counters.stage_run_s,
            ),
            ("compute_seconds", "Time that executors computed.", counters.compute_s),
            ("decide_seconds", "Processor time of scheduling and of managing experts.", counters.decide_s),
            ("failed_audits", "Times that an idle audit found a defect.", counters.failed_audits),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        for name, text, value in (
            ("waiting", "Stages that no executor has.", runtime.engine.waiting),
            ("running", "Requests that executors have.", len(runtime.engine.executing())),
            ("experts_resident", "Experts in memory, as often as they are there.", runtime.engine.resident),
            ("expert_memory_bytes", "Memory for experts.", runtime.plan.experts),
            (
                "intermediates_bytes",
                "What batches may take, of all executors.",
                runtime.plan.intermediates * len(runtime.names),
            ),
            (
                "preparing_bytes",
                "Memory for inputs while they are decoded or tokenised.",
                runtime.plan.preparing * len(runtime.names),
            ),
            ("executors", "Executors.", len(runtime.names)),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._batches()

    def _batches(self) -> Metric:
        sizes = self._runtime.engine.counters.batch_sizes.copy()
        buckets = [(str(most), float(sum(count for size, count in sizes.items() if size <= most))) for most in _BATCHES]
        buckets.append(("+Inf", float(sum(sizes.values()))))
        family = HistogramMetricFamily(PREFIX + "batch_requests", "Requests in a batch.", labels=_LABELS)
        family.add_metric(self._labels, buckets, sum(size * count for size, count in sizes.items()))
        return family
