"""Where a request spent its time: spans, sent to an OpenTelemetry collector, that go along from service to service.

It is off until ``start``: until then every function does nothing, in well under a microsecond, and opentelemetry is not
imported. Nothing here ever waits for the collector or fails because of it. Spans wait in a bounded queue, and a span
that finds it full is dropped.

    headers = telemetry.inject(headers)                 the current span goes along with a record or a call
    parent = telemetry.extract(record.headers)          and is found again on the other side
    with telemetry.span("place", parent=parent, request_id=...) as span:
        span.set("worker", worker)

Within an async generator use ``begin``, since a ``with`` around a ``yield`` would leak the span into the consumer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from greenroom.fabric.telemetry.config import TelemetryConfig

if TYPE_CHECKING:
    from greenroom.fabric.telemetry.tracing import Tracing

__all__ = [
    "Parent",
    "Span",
    "TelemetryConfig",
    "begin",
    "enabled",
    "extract",
    "inject",
    "inject_metadata",
    "span",
    "start",
    "stop",
    "trace_id",
]

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool
Parent = object
"""A span of this process or another, as ``extract`` found it."""

H = TypeVar("H", bytes, str | bytes)


class Span:
    """A stretch of time with a name. This one is of no trace: its methods do nothing."""

    __slots__ = ()

    def set(self, key: str, value: Value) -> None:
        """Sets an attribute."""

    def event(self, name: str) -> None:
        """Something happens in it now."""

    def fail(self, message: str) -> None:
        """Its work failed."""

    def end(self) -> None:
        """It ends now. For a span that was begun; a span in a ``with`` ends with that."""

    def active(self) -> AbstractContextManager[object]:
        """Within it, this is the current span."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


_NOTHING = Span()
_tracing: Tracing | None = None


def start(config: TelemetryConfig) -> None:
    """From now on spans are recorded and sent. Raises InvalidConfig, also where opentelemetry is not installed."""
    global _tracing  # one a process, as OpenTelemetry has it
    from greenroom.fabric.telemetry.tracing import Tracing

    if _tracing is not None:
        raise RuntimeError("telemetry has been started already")
    _tracing = Tracing(config)


async def stop(timeout_s: float = 5.0) -> None:
    """Off again. Waiting spans are sent, within ``timeout_s``."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        await tracing.close(timeout_s)


def enabled() -> bool:
    return _tracing is not None


def span(name: str, *, parent: Parent | None = None, kind: Kind = "internal", **attributes: Value) -> Span:
    """To be entered: within, it is the current span. ``parent`` None: a child of the current one, if any."""
    return _NOTHING if _tracing is None else _tracing.span(name, parent, kind, attributes)


def begin(name: str, *, parent: Parent | None = None, kind: Kind = "internal", **attributes: Value) -> Span:
    """Runs until its ``end``; it is the current one only within its ``active``."""
    return span(name, parent=parent, kind=kind, **attributes)


def inject(headers: Sequence[tuple[str, bytes]] = ()) -> Sequence[tuple[str, bytes]]:
    """``headers`` of a record, with the current span if there is one."""
    return headers if _tracing is None else (*headers, *((key, text.encode()) for key, text in _tracing.carried()))


def inject_metadata(metadata: tuple[tuple[str, str | bytes], ...] = ()) -> tuple[tuple[str, str | bytes], ...]:
    """``metadata`` of a call, with the current span if there is one."""
    return metadata if _tracing is None else (*metadata, *_tracing.carried())


def extract(headers: Iterable[tuple[str, H]]) -> Parent | None:
    """The span that the sender's ``inject`` put there; None where there is none, or it can not be read."""
    return None if _tracing is None else _tracing.found(headers)


def trace_id() -> str:
    """Of the current span, 32 hexadecimal digits; empty where there is none."""
    return "" if _tracing is None else _tracing.trace_id()
