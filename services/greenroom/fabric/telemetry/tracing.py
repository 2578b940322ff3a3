"""Spans by OpenTelemetry. Imported only where telemetry is switched on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.telemetry import Kind, Parent, Span, Value
from greenroom.fabric.telemetry.config import TelemetryConfig

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise InvalidConfig(
        "otlp_endpoint", "given", f"{error.name} is not installed: pip install 'greenroom[otlp]'"
    ) from error

_LOG = logging.getLogger(__name__)
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}
_CARRIED = ("traceparent", "tracestate")
_MAX_CARRIED = 1024
_NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.http.transport",
    "opentelemetry.sdk._shared_internal",
)
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """The implementation behind ``greenroom.fabric.telemetry``."""

    def __init__(self, config: TelemetryConfig) -> None:
        named = {"service.name": config.service, "service.instance.id": config.instance}
        self._provider = TracerProvider(
            resource=Resource.create({key: value for key, value in named.items() if value}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _exporter(config),
                max_queue_size=config.queue,
                max_export_batch_size=min(512, config.queue),
                schedule_delay_millis=config.send_every_s * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("greenroom")
        seldom = _Seldom()
        for name in _NOISY:
            logging.getLogger(name).addFilter(seldom)

    def span(self, name: str, parent: Parent | None, kind: Kind, attributes: Mapping[str, Value]) -> Span:
        above = parent if isinstance(parent, contexts.Context) else None
        return _Live(self._tracer.start_span(name, context=above, kind=_KINDS[kind], attributes=attributes))

    def carried(self) -> list[tuple[str, str]]:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        return list(carrier.items())

    def found(self, headers: Iterable[tuple[str, str | bytes]]) -> Parent | None:
        carrier = {
            key: value.decode("ascii", "replace") if isinstance(value, bytes) else value
            for key, value in headers
            if key in _CARRIED and len(value) <= _MAX_CARRIED
        }
        if "traceparent" not in carrier:
            return None
        context = _propagator.extract(carrier, contexts.Context())
        return context if trace.get_current_span(context).get_span_context().is_valid else None

    def trace_id(self) -> str:
        present = trace.get_current_span().get_span_context()
        return trace.format_trace_id(present.trace_id) if present.is_valid else ""

    async def close(self, timeout_s: float) -> None:
        """In a daemon thread, since the collector may not answer."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="telemetry's end", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await closed.wait()
        except TimeoutError:
            _LOG.warning("spans were not sent within %g seconds and are lost", timeout_s)


class _Live(Span):
    """A span that is recorded."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: object = None

    def set(self, key: str, value: Value) -> None:
        self._span.set_attribute(key, value)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, message: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, message)

    def end(self) -> None:
        self._span.end()

    def active(self) -> AbstractContextManager[object]:
        return self._active()

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        token = contexts.attach(trace.set_span_in_context(self._span))
        try:
            yield
        finally:
            contexts.detach(token)

    def __enter__(self) -> Self:
        self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        contexts.detach(self._token)  # type: ignore[arg-type]  # as it was attached
        if kind is not None and not issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self.fail(kind.__name__)
        self._span.end()


class _Seldom(logging.Filter):
    """Lets one line a minute through for each place in the code: enough to tell that a collector is away."""

    def __init__(self, every_s: float = 60.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._last.get(place, -self._every_s) < self._every_s:
            return False
        self._last[place] = now
        return True


def _exporter(config: TelemetryConfig) -> SpanExporter:
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(
            endpoint=config.endpoint, insecure=config.endpoint.startswith("http:"), timeout=config.timeout_s
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OTLPOverHttp

    return OTLPOverHttp(endpoint=config.traces_url, timeout=config.timeout_s)
