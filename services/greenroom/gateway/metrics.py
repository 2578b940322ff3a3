"""The front door's Prometheus metrics, named as vLLM names them, with our prefix."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from greenroom.core.generation import Finished, FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
            320.0, 640.0, 1280.0, 2560.0)  # fmt: skip
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class ModelMetrics:
    """What is counted of one model's sequences."""

    def __init__(self, families: _Families, model_name: str) -> None:
        self.waiting = families.waiting.labels(model_name)
        self.running = families.running.labels(model_name)
        self.first_token = families.first_token.labels(model_name)
        self.inter_token = families.inter_token.labels(model_name)
        self.queued = families.queued.labels(model_name)
        self.end_to_end = families.end_to_end.labels(model_name)
        self.prompt_lengths = families.prompt_lengths.labels(model_name)
        self.generation_lengths = families.generation_lengths.labels(model_name)
        self.prompt_tokens = families.prompt_tokens.labels(model_name)
        self.generation_tokens = families.generation_tokens.labels(model_name)
        self.approximated_tokens = families.approximated_tokens.labels(model_name)
        self._success = {reason: families.success.labels(model_name, reason.value) for reason in FinishReason}

    def ended(self, reason: FinishReason) -> None:
        self._success[reason].inc()


class _Families:
    """The metrics that have the label ``model_name``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"greenroom_{name}", text, ["model_name"], registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"greenroom_{name}", text, ["model_name"], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"greenroom_{name}", text, ["model_name"], buckets=buckets, registry=registry)

        self.waiting = gauge("num_requests_waiting", "Sequences accepted that have no token yet")
        self.running = gauge("num_requests_running", "Sequences of which tokens are coming")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "From one token to the next", _SECONDS)
        self.queued = histogram("request_queue_time_seconds", "Between acceptance and the first step", _SECONDS)
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end", _SECONDS)
        self.prompt_lengths = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.generation_lengths = histogram("request_generation_tokens", "Tokens generated for a sequence", _TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts that were begun")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.approximated_tokens = counter(
            "approximated_tokens",
            "Tokens of prompts and answers, each by the share of its routing that was approximated",
        )
        self.success = Counter(
            "greenroom_request_success",
            "Sequences that ended, by the reason for it",
            ["model_name", "finished_reason"],
            registry=registry,
        )


class GatewayMetrics:
    """All metrics of a gateway. A registry takes only one of these, since names are unique in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = _Families(registry)
        self._models: dict[str, ModelMetrics] = {}
        self._http = Counter("greenroom_http_requests", "HTTP requests answered", ["path", "status"], registry=registry)
        self._errors = Counter(
            "greenroom_http_errors", "HTTP requests and streams that ended with an error", ["code"], registry=registry
        )
        self._rpc = Counter("greenroom_grpc_requests", "gRPC calls answered", ["method", "status"], registry=registry)
        self._rpc_errors = Counter(
            "greenroom_grpc_errors", "gRPC calls that ended with an error", ["code"], registry=registry
        )

    def of(self, model_name: str) -> ModelMetrics:
        """``model_name``: the served name, never one that a client sent, so that the number of labels is bounded."""
        found = self._models.get(model_name)
        if found is None:
            found = self._models[model_name] = ModelMetrics(self._families, model_name)
        return found

    def answered(self, path: str, status: int) -> None:
        """``path``: the route, never the path that a client sent, so that the number of labels is bounded."""
        self._http.labels(path, str(status)).inc()

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def called(self, method: str, status: str, code: str | None) -> None:
        """A gRPC call ended. ``code``: the same as in an HTTP reply, None where it went well."""
        self._rpc.labels(method, status).inc()
        if code is not None:
            self._rpc_errors.labels(code).inc()


class SequenceMeter:
    """Times one sequence. ``arrived`` is monotonic, in seconds."""

    def __init__(self, metrics: ModelMetrics, prompt_tokens: int, arrived: float) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrived = arrived
        self._last: float | None = None
        self._tokens = 0
        metrics.waiting.inc()

    def token(self) -> None:
        now = time.monotonic()
        metrics = self._metrics
        if self._last is None:
            self._begin()
            metrics.first_token.observe(now - self._arrived)
        else:
            metrics.inter_token.observe(now - self._last)
        self._last = now
        self._tokens += 1
        metrics.generation_tokens.inc()

    def _begin(self) -> None:
        metrics = self._metrics
        metrics.waiting.dec()
        metrics.running.inc()
        metrics.prompt_tokens.inc(self._prompt_tokens)
        metrics.prompt_lengths.observe(self._prompt_tokens)

    def finished(self, finished: Finished) -> None:
        """What the generator says of the sequence as a whole."""
        self._metrics.queued.observe(finished.queue_seconds)
        rows = max(0, finished.prompt_tokens + finished.generated_tokens - 1)
        self._metrics.approximated_tokens.inc(rows * finished.approximated)

    def end(self, reason: FinishReason | None) -> None:
        """``reason`` None: the sequence was never taken, so it counts among the errors only."""
        metrics = self._metrics
        (metrics.waiting if self._last is None else metrics.running).dec()
        if reason is None:
            return
        metrics.end_to_end.observe(time.monotonic() - self._arrived)
        metrics.generation_lengths.observe(self._tokens)
        metrics.ended(reason)
