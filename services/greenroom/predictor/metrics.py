"""What the predictor counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from greenroom.predictor.kinds.config import BUILT_KINDS
from greenroom.predictor.kinds.emoe.config import LEARNED_KINDS
from greenroom.predictor.kinds.statistics.served import Source

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TRAINING_SECONDS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class PredictorMetrics:
    """Registers at construction; one for a registry, since names are unique there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"greenroom_predictor_{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"greenroom_predictor_{name}", text, registry=registry)

        self.sequences = counter("sequences", "Sequences learnt from")
        self.duplicates = counter("duplicates", "Traces of sequences that were counted already")
        self.empty = counter("empty_traces", "Traces without a row")
        self.dead_letters = counter("dead_letters", "Traces that could not be read or contradict their model")
        self.retries = counter("append_retries", "Appends to the dead letters that were tried again")
        self.published = counter("artifacts_published", "Versions written")
        self.failures = counter("artifact_failures", "Versions that could not be written, and were tried again")
        self.unsaved = gauge("unsaved_sequences", "Sequences that are in no version yet")
        self.statistics_bytes = gauge("statistics_bytes", "What is known of all models and task types, in bytes")
        self.publishing = Histogram(
            "greenroom_predictor_publish_seconds", "To write a version", buckets=_SECONDS, registry=registry
        )
        self.forecasting = Histogram(
            "greenroom_predictor_forecast_seconds", "To make a forecast", buckets=_SECONDS, registry=registry
        )
        self._evicted = Counter(
            "greenroom_predictor_evicted",
            "Statistics that went because the budget of bytes was full",
            ["what"],
            registry=registry,
        )
        self._forecasts = Counter(
            "greenroom_predictor_forecasts", "Forecasts, by what they were made from", ["source"], registry=registry
        )
        self._serving = Gauge(
            "greenroom_predictor_serving_version", "The version that is served", ["model_name"], registry=registry
        )
        self._lag = Gauge(
            "greenroom_predictor_lag", "Records of `traces` that are in no version", ["partition"], registry=registry
        )
        self.unlearnable = counter("unlearnable", "Sequences of another number of picks than their model's others")
        self._learning_sequences = gauge("learning_sequences", "Sequences kept for learned predictors to be trained on")
        self._learning_bytes = gauge("learning_bytes", "What they take in memory")
        self.training = Histogram(
            "greenroom_predictor_training_seconds",
            "To train a learned predictor",
            buckets=_TRAINING_SECONDS,
            registry=registry,
        )
        self._trainings = Counter(
            "greenroom_predictor_trainings",
            "Trainings of learned predictors, by how they ended",
            ["kind", "result"],
            registry=registry,
        )
        self._forgone = Counter(
            "greenroom_predictor_learned_forecasts_forgone",
            "Forecasts that statistics made though a learned predictor is served",
            ["kind", "why"],
            registry=registry,
        )
        self._serving_learned = Gauge(
            "greenroom_predictor_serving_learned_version",
            "The version of a learned predictor that is served",
            ["model_name", "kind"],
            registry=registry,
        )
        self._register_building(registry)
        for kind in LEARNED_KINDS:
            for result in ("published", "withheld", "failed", "timed_out"):
                self._trainings.labels(kind, result)
            for why in ("late", "crowded", "failed"):
                self._forgone.labels(kind, why)
        for what in ("task_type", "model"):
            self._evicted.labels(what)
        for source in Source:
            self._forecasts.labels(source.value)

    def _register_building(self, registry: CollectorRegistry) -> None:
        self.building = Histogram(
            "greenroom_predictor_build_seconds",
            "To make an artifact of an expert policy",
            buckets=_TRAINING_SECONDS,
            registry=registry,
        )
        self.unbuildable = Counter(
            "greenroom_predictor_unbuildable", "Sequences that no artifact can be made of", registry=registry
        )
        self._builds = Counter(
            "greenroom_predictor_builds",
            "Artifacts of expert policies, by how their making ended",
            ["kind", "result"],
            registry=registry,
        )
        self._recorded = Counter(
            "greenroom_predictor_recorded_sequences",
            "Sequences kept for artifacts; low: those that were foreseen badly",
            ["kind", "recall"],
            registry=registry,
        )
        self._building_sequences = Gauge(
            "greenroom_predictor_building_sequences", "Sequences that are kept for artifacts", registry=registry
        )
        self._building_bytes = Gauge(
            "greenroom_predictor_building_bytes", "What they take in memory", registry=registry
        )
        self._serving_built = Gauge(
            "greenroom_predictor_serving_built_version",
            "The version of an expert policy's artifact that workers are given",
            ["model_name", "kind"],
            registry=registry,
        )
        for kind in BUILT_KINDS:
            for result in ("published", "failed", "timed_out"):
                self._builds.labels(kind, result)
            for recall in ("low", "other"):
                self._recorded.labels(kind, recall)

    def evicted(self, what: str) -> None:
        self._evicted.labels(what).inc()

    def forecast(self, source: Source) -> None:
        self._forecasts.labels(source.value).inc()

    def serving(self, model: str, version: int) -> None:
        self._serving.labels(model).set(version)

    def not_serving(self, model: str) -> None:
        self._serving.remove(model)

    def trained(self, kind: str, result: str) -> None:
        self._trainings.labels(kind, result).inc()

    def forgone(self, kind: str, why: str) -> None:
        self._forgone.labels(kind, why).inc()

    def learning_from(self, sequences: int, nbytes: int) -> None:
        self._learning_sequences.set(sequences)
        self._learning_bytes.set(nbytes)

    def serving_learned(self, model: str, kind: str, version: int) -> None:
        self._serving_learned.labels(model, kind).set(version)

    def not_serving_learned(self, model: str, kind: str) -> None:
        self._serving_learned.remove(model, kind)

    def built(self, kind: str, result: str) -> None:
        self._builds.labels(kind, result).inc()

    def recorded(self, kind: str, low: bool) -> None:
        self._recorded.labels(kind, "low" if low else "other").inc()

    def building_from(self, sequences: int, nbytes: int) -> None:
        self._building_sequences.set(sequences)
        self._building_bytes.set(nbytes)

    def serving_built(self, model: str, kind: str, version: int) -> None:
        self._serving_built.labels(model, kind).set(version)

    def not_serving_built(self, model: str, kind: str) -> None:
        self._serving_built.remove(model, kind)

    def lag(self, partition: int, records: int) -> None:
        self._lag.labels(str(partition)).set(records)

    def not_held(self, partition: int) -> None:
        self._lag.remove(str(partition))
