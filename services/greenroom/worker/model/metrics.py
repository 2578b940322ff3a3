"""The worker's counters as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.policies.base.events import Reason
from greenroom.worker.model.model_runtime import ModelRuntime

PREFIX = "greenroom_"

_STEPS = "In steps with prompt rows (prefill) and in the others (decode)"


class WorkerCollector(Collector):
    """To be registered with a CollectorRegistry. Look-ups and hits are two counters, so that a hit rate can be computed
    over any window."""

    def __init__(self, worker: ModelRuntime) -> None:
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        yield from self._experts()
        yield from self._batches()

    def _experts(self) -> Iterable[Metric]:
        engine = self._worker.experts
        counters = engine.refresh_counters()
        phases = counters.phases
        yield _by_phase("expert_steps", "Steps.", {phase: of.steps for phase, of in phases.items()})
        yield _by_phase(
            "expert_lookups", "Distinct experts that a layer of a step needed.",
            {phase: of.lookups for phase, of in phases.items()},
        )  # fmt: skip
        yield _by_phase(
            "expert_hits", "Look-ups of experts that were resident.", {phase: of.hits for phase, of in phases.items()}
        )
        yield _by_phase(
            "expert_on_demand_fetches", "Transfers that a layer waited for.",
            {phase: of.on_demand_fetches for phase, of in phases.items()},
        )  # fmt: skip
        yield _counter("expert_prefetches", "Transfers begun before a layer needed them.", counters.prefetches)
        yield _counter("expert_prefetches_used", "Prefetches that a look-up met.", counters.prefetches_used)
        yield _counter("expert_prefetches_wasted", "Prefetches evicted unused.", counters.prefetches_wasted)
        if engine.host is not None:
            begun, used, wasted = (
                counters.host_prefetches, counters.host_prefetches_used, counters.host_prefetches_wasted
            )  # fmt: skip
            yield _counter("expert_host_prefetches", "Transfers begun to the host tier and no further.", begun)
            yield _counter("expert_host_prefetches_used", "Those of them that went on to the device.", used)
            yield _counter("expert_host_prefetches_wasted", "Those of them that left the host unused.", wasted)
        yield _counter("expert_evictions", "Experts that left the device tier.", counters.evictions)
        yield _counter("expert_failed_transfers", "Transfers that failed.", counters.failed_transfers)
        everywhere = {**phases, "between": counters.between}
        yield _by_phase(
            "expert_stall_seconds", "Time in which layers waited for transfers.",
            {phase: of.stall_seconds for phase, of in everywhere.items()},
        )  # fmt: skip
        moved = CounterMetricFamily(
            f"{PREFIX}expert_transfer_bytes",
            f"Bytes moved over a link, for a layer that waited or ahead of any. {_STEPS}, and between steps.",
            labels=["link", "phase", "reason"],
        )
        for phase, of in everywhere.items():
            for link, count in of.bytes_by_link.copy().items():
                moved.add_metric([link, phase, Reason.ON_DEMAND], count.on_demand)
                moved.add_metric([link, phase, Reason.PREFETCH], count.prefetched)
        yield moved
        slots = GaugeMetricFamily(f"{PREFIX}expert_slots", "Experts that a tier can hold.", labels=["tier"])
        slots.add_metric(["device"], engine.device.slots)
        if engine.host is not None:
            slots.add_metric(["host"], engine.host.slots)
        yield slots
        versions = GaugeMetricFamily(
            f"{PREFIX}expert_artifact_version", "Of what the expert policy predicts by; 0: none yet.", labels=["kind"]
        )
        for kind, version in self._worker.artifacts.items():
            versions.add_metric([kind], 0 if version is None else version.version)
        yield versions
        yield _gauge("experts_resident", "Experts in the device tier.", len(engine.resident_keys()))
        fill = engine.fill_progress
        yield _gauge("expert_fill_left", "Experts that the first fill of the device tier still brings.", fill.left)
        yield _gauge("expert_fill_bytes", "What the first fill of the device tier has brought.", fill.nbytes)
        yield _gauge("expert_fill_seconds", "How long the first fill took, or takes so far.", fill.seconds)

    def _batches(self) -> Iterable[Metric]:
        stats, costs = self._worker.loop.stats(), self._worker.loop.engine.costs
        yield _counter("steps", "Forward passes.", stats.steps)
        yield _counter("step_seconds", "Time spent in steps.", stats.step_seconds)
        yield _counter("decide_seconds", "Time that the batch policy took.", stats.decide_seconds)
        yield _counter("paths_seconds", "Time that foretelling routing paths took.", stats.paths_seconds)
        yield _counter("path_failures", "Times that foretelling routing paths failed.", stats.path_failures)
        rows = CounterMetricFamily(f"{PREFIX}step_rows", "Rows of all forward passes.", labels=["phase"])
        rows.add_metric(["prefill"], stats.prefill_rows)
        rows.add_metric(["decode"], stats.decode_rows)
        yield rows
        for name, text, seconds in (
            ("row_compute_seconds", "Computing a row of a step with prompts, as measured.", costs.row_seconds),
            ("missing_experts_seconds", "Moving the experts that are missing now.", costs.moving_seconds),
        ):
            if seconds is not None:
                yield _gauge(name, text, seconds)
        yield _gauge("batch_requests_running", "Requests in the batch.", stats.running)
        yield _gauge("batch_requests_waiting", "Requests that wait to join the batch.", stats.waiting)
        yield _counter("requests_started", "Requests admitted.", stats.started)
        yield _counter("kv_shortages", "Times that memory within the KV budget could not be had.", stats.kv_shortages)
        yield _counter(
            "kv_preemptions", "Times that a request gave up its keys and values for others.", stats.preemptions
        )
        yield _counter("recomputed_rows", "Rows that ran again after that.", stats.recomputed_rows)
        yield _counter("failed_audits", "Times that an idle audit found a defect.", stats.audit_failures)
        yield _gauge("kv_reserved_bytes", "Memory reserved for keys and values.", stats.kv_reserved_bytes)
        yield _gauge("kv_budget_bytes", "Memory that keys and values may take.", stats.kv_budget_bytes)


def _by_phase(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    where = f"{_STEPS}, and between steps." if "between" in values else f"{_STEPS}."
    family = CounterMetricFamily(PREFIX + name, f"{text} {where}", labels=["phase"])
    for phase, value in values.items():
        family.add_metric([phase], value)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
