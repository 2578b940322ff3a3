"""The trace contexts of a pool's requests, kept beside the state machine, which knows nothing of them."""

from __future__ import annotations

from greenroom.fabric import telemetry
from greenroom.fabric.log import Record
from greenroom.scheduler.pool import Pool


class TraceContexts:
    """The span that each request came with, while the pool has the request. Empty while telemetry is off."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._spans: dict[str, telemetry.Parent] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def came(self, request_id: str, record: Record) -> None:
        """The pool has been told of a record of ``tasks``. The first record of a request that has a span counts."""
        if not telemetry.enabled() or request_id not in self._pool.entries:
            return
        span = telemetry.extract(record.headers)
        if span is not None:
            self._spans.setdefault(request_id, span)

    def ended(self, request_id: str) -> None:
        """The pool has been told of an outcome. An outcome that does not count ends nothing."""
        if request_id not in self._pool.entries:
            self._spans.pop(request_id, None)

    def span(
        self, name: str, request_id: str, kind: telemetry.Kind = "internal", **attributes: telemetry.Value
    ) -> telemetry.Span:
        """To be entered: a child of the span that the request came with; without one it is of no trace."""
        parent = self._spans.get(request_id)
        if parent is None:
            return telemetry.Span()
        return telemetry.span(name, parent=parent, kind=kind, request_id=request_id, **attributes)
