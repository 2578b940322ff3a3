"""Metrics of the requests that a gateway has in flight."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.gateway.pipeline.pipeline import Pipeline


class PipelineCollector(Collector):
    """Read when asked; nothing is counted twice."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "greenroom_gateway_flights", "Requests on their way from here", value=len(self._pipeline.in_flight)
        )
        yield CounterMetricFamily(
            "greenroom_gateway_outcomes_dropped",
            "Outcomes of requests with an idempotency key that were given up for room",
            value=self._pipeline.in_flight.kept.answers_dropped,
        )
        yield CounterMetricFamily(
            "greenroom_gateway_ends_dropped",
            "Of these, requests of which is not even kept how they ended",
            value=self._pipeline.in_flight.kept.ends_dropped,
        )
        yield CounterMetricFamily(
            "greenroom_gateway_journal_unreadable",
            "Records of the journal that could not be read",
            value=self._pipeline.journal_unreadable,
        )
