"""What task-type extraction counts."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from greenroom.tasktype.extractor import UNKNOWN

OTHER = "other"
_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TaskTypeMetrics:
    """Registers at construction; one for a registry, since names are unique there.

    A type that a client made up is counted as ``other``, so that clients can not make series without end.
    """

    def __init__(self, registry: CollectorRegistry, task_types: Collection[str], extractor: str) -> None:
        """``extractor``: the name of what tells ``task_types`` apart."""
        self._known = {*task_types, UNKNOWN}
        self._requests = Counter(
            "greenroom_tasktype_requests",
            "Requests passed on, by their task type and who said so",
            ["task_type", "source"],
            registry=registry,
        )
        for name in self._known:
            self._requests.labels(name, extractor)
        self.cancels = Counter("greenroom_tasktype_cancels", "Cancels passed on", registry=registry)
        self.dead_letters = Counter("greenroom_tasktype_dead_letters", "Records given up", registry=registry)
        self.retries = Counter("greenroom_tasktype_append_retries", "Appends that were tried again", registry=registry)
        self.in_flight = Gauge("greenroom_tasktype_in_flight", "Records read and not finished", registry=registry)
        self.delay = Histogram(
            "greenroom_tasktype_delay_seconds",
            "From a request's append by the gateway to its task's, by the broker's clock",
            buckets=_SECONDS,
            registry=registry,
        )
        self._lag = Gauge(
            "greenroom_tasktype_lag", "Records of `requests` not finished", ["partition"], registry=registry
        )

    def request(self, task_type: str, source: str) -> None:
        self._requests.labels(task_type if task_type in self._known else OTHER, source).inc()

    def lag(self, partition: int, records: int) -> None:
        self._lag.labels(str(partition)).set(records)

    def not_held(self, partition: int) -> None:
        """The lag of a partition is told by the instance that has it."""
        self._lag.remove(str(partition))
