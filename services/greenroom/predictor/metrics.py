"""What the predictor counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_MAKING_SECONDS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """The version that is served of each model. ``labels``: those after the model's name."""

    gauge: Gauge
    labels: tuple[str, ...] = ()

    def set(self, model: str, version: int) -> None:
        self.gauge.labels(model, *self.labels).set(version)

    def remove(self, model: str) -> None:
        self.gauge.remove(model, *self.labels)


@dataclass(frozen=True, slots=True)
class MakingMetrics:
    """Of kinds that are made together, under one limit of memory. ``unusable``: sequences that nothing can be made of.
    ``recorded``: sequences by whether they were foreseen badly; None: that is not counted."""

    made: Counter
    seconds: Histogram
    sequences: Gauge
    nbytes: Gauge
    unusable: Counter
    serving: Gauge
    results: Sequence[str]
    recorded: Counter | None = None

    def show(self, kind: str) -> None:
        """Show the counts of ``kind`` from the start."""
        for result in self.results:
            self.made.labels(kind, result)
        if self.recorded is not None:
            for recall in ("low", "other"):
                self.recorded.labels(kind, recall)

    def ended(self, kind: str, result: str) -> None:
        self.made.labels(kind, result).inc()

    def took(self, kind: str, low: bool) -> None:
        if self.recorded is not None:
            self.recorded.labels(kind, "low" if low else "other").inc()

    def kept(self, sequences: int, nbytes: int) -> None:
        self.sequences.set(sequences)
        self.nbytes.set(nbytes)

    def served(self, kind: str) -> ServedVersions:
        return ServedVersions(self.serving, (kind,))


class PredictorMetrics:
    """Registers at construction; one for a registry, since names are unique there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"greenroom_predictor_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"greenroom_predictor_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"greenroom_predictor_{name}", text, buckets=buckets, registry=registry)

        self.sequences = counter("sequences", "Sequences learnt from")
        self.duplicates = counter("duplicates", "Traces of sequences that were counted already")
        self.empty = counter("empty_traces", "Traces without a row")
        self.dead_letters = counter("dead_letters", "Traces that could not be read or contradict their model")
        self.retries = counter("append_retries", "Appends to the dead letters that were tried again")
        self.published = counter("artifacts_published", "Versions written")
        self.failures = counter("artifact_failures", "Versions that could not be written, and were tried again")
        self.unsaved = gauge("unsaved_sequences", "Sequences that are in no version yet")
        self.statistics_bytes = gauge("statistics_bytes", "What is known of all models and task types, in bytes")
        self.publishing = histogram("publish_seconds", "To write a version", _SECONDS)
        self.forecasting = histogram("forecast_seconds", "To make a forecast", _SECONDS)
        self.evicted = counter("evicted", "Statistics that went because the budget of bytes was full", "what")
        self.forecasts = counter("forecasts", "Forecasts, by what they were made from", "source")
        self.forgone = counter(
            "learned_forecasts_forgone", "Forecasts that statistics made though a learned predictor is served",
            "kind", "why",
        )  # fmt: skip
        self.serving = ServedVersions(gauge("serving_version", "The version that is served", "model_name"))
        self.lag = gauge("lag", "Records of `traces` that are in no version", "partition")
        self.learning = MakingMetrics(
            counter("trainings", "Trainings of learned predictors, by how they ended", "kind", "result"),
            histogram("training_seconds", "To train a learned predictor", _MAKING_SECONDS),
            gauge("learning_sequences", "Sequences kept for learned predictors to be trained on"),
            gauge("learning_bytes", "What they take in memory"),
            counter("unlearnable", "Sequences of another number of picks than their model's others"),
            gauge(
                "serving_learned_version", "The version of a learned predictor that is served", "model_name", "kind"
            ),
            ("published", "withheld", "failed", "timed_out"),
        )  # fmt: skip
        self.building = MakingMetrics(
            counter("builds", "Artifacts of expert policies, by how their making ended", "kind", "result"),
            histogram("build_seconds", "To make an artifact of an expert policy", _MAKING_SECONDS),
            gauge("building_sequences", "Sequences that are kept for artifacts"),
            gauge("building_bytes", "What they take in memory"),
            counter("unbuildable", "Sequences that no artifact can be made of"),
            gauge(
                "serving_built_version", "The version of an expert policy's artifact that workers are given",
                "model_name", "kind",
            ),
            ("published", "failed", "timed_out"),
            counter(
                "recorded_sequences", "Sequences kept for artifacts; low: those that were foreseen badly",
                "kind", "recall",
            ),
        )  # fmt: skip
        for what in ("task_type", "model"):
            self.evicted.labels(what)
