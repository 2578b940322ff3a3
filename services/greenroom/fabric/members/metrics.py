"""The members that this process knows, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.core.messages import MemberKind
from greenroom.fabric.members.directory import Directory


class MembersCollector(Collector):
    """Read when asked."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        members = GaugeMetricFamily("greenroom_members", "Instances that are here, as this one knows", labels=["kind"])
        for kind in MemberKind:
            members.add_metric([kind.value], len(self._directory.of(kind)))
        yield members
        yield CounterMetricFamily(
            "greenroom_members_unreadable",
            "Records of `members` that could not be read",
            value=self._directory.unreadable,
        )
