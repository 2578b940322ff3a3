"""What a worker's service counts, and how Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "greenroom_worker_"
_MOST_SOURCES = 16


@dataclass(slots=True)
class ServiceCounters:
    """Counts since the start, written on the event loop alone."""

    runs: int = 0
    attached: int = 0
    refused: int = 0
    results: int = 0
    given_back: int = 0
    forgotten: int = 0
    tokens: int = 0
    tokens_sent: int = 0
    messages_sent: int = 0
    gateway_calls: int = 0
    gateways_dropped: int = 0
    gateways_gone: int = 0
    lease_renewals: int = 0
    lease_lapses: int = 0
    traces: int = 0
    traces_dropped: int = 0
    traces_failed: int = 0
    forecasts: int = 0
    forecasts_failed: int = 0
    forecasts_spared: int = 0
    artifacts: int = 0
    artifacts_failed: int = 0
    artifacts_refused: int = 0
    prefix_tokens: int = 0
    prefill_rows_for_nothing: int = 0
    forecasts_by_source: dict[str, int] = field(default_factory=dict)

    def forecast(self, source: str) -> None:
        """A forecast was taken. ``source``: what the predictor made it from."""
        self.forecasts += 1
        counts = self.forecasts_by_source
        if source not in counts and len(counts) >= _MOST_SOURCES:
            source = "other"
        counts[source] = counts.get(source, 0) + 1


HELP = {
    "runs": "Requests that were begun here.",
    "attached": "Calls that attached to a request that was here.",
    "refused": "Calls that were refused.",
    "results": "Ends that were reported to a scheduler.",
    "given_back": "Requests given back because the worker stopped.",
    "forgotten": "Requests dropped because no scheduler's call waited for them.",
    "tokens": "Tokens generated, those apart that nobody wanted.",
    "tokens_sent": "Tokens sent to gateways.",
    "messages_sent": "Messages to gateways.",
    "gateway_calls": "Calls opened to gateways.",
    "gateways_dropped": "Calls to gateways dropped because they were too slow.",
    "gateways_gone": "Gateways found gone while something ran for them.",
    "lease_renewals": "Times that a scheduler renewed the lease.",
    "lease_lapses": "Times that the lease ran out before it was renewed.",
    "traces": "Routing traces written.",
    "traces_dropped": "Routing traces dropped because too many waited.",
    "traces_failed": "Routing traces that the log did not take.",
    "forecasts": "Forecasts taken from the predictor.",
    "forecasts_failed": "Forecasts that did not come, or not in time.",
    "forecasts_spared": "Times that a forecast was due and no task that ran was sensitive to which experts are here.",
    "forecasts_by_source": "Forecasts taken, by what they were made from.",
    "artifacts": "Versions of what the expert policy predicts by, taken from the predictor.",
    "artifacts_failed": "Times that the predictor could not be asked for them.",
    "artifacts_refused": "Versions that the expert policy could not use.",
    "prefix_tokens": "Tokens taken over from an earlier attempt.",
    "prefill_rows_for_nothing": "Rows of prompts computed for runs that were begun anew, or dropped unheard.",
}


class ServiceCollector(Collector):
    """To be registered with a CollectorRegistry. ``gauges``: names, help texts and present values."""

    def __init__(
        self, counters: ServiceCounters, gauges: Callable[[], Iterable[tuple[str, str, float]]] = lambda: ()
    ) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        for each in fields(self._counters):
            value = getattr(self._counters, each.name)
            if isinstance(value, dict):
                by_source = CounterMetricFamily(PREFIX + each.name, HELP[each.name], labels=["source"])
                for source, count in value.items():
                    by_source.add_metric([source], count)
                yield by_source
            else:
                yield CounterMetricFamily(PREFIX + each.name, HELP[each.name], value=value)
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
