"""The metrics of a process that every service has beside its own."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures: CPU, memory, open files, garbage collection."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample for every counter, read by nobody
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
