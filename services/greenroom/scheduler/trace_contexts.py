"""Which traces a pool's requests belong to: kept beside its state machine, which knows nothing of them."""

from __future__ import annotations

from greenroom.fabric import telemetry
from greenroom.fabric.log import Record
from greenroom.scheduler.pool import Pool


class Origins:
    """The span that each request came with, for as long as the pool has the request. Empty while telemetry is off."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._spans: dict[str, telemetry.Parent] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def came(self, request_id: str, record: Record) -> None:
        """The pool has been told of a record of ``tasks``. Of a request's records the first that has a span counts."""
        if not telemetry.enabled() or request_id not in self._pool.entries:
            return
        span = telemetry.extract(record.headers)
        if span is not None:
            self._spans.setdefault(request_id, span)

    def ended(self, request_id: str) -> None:
        """The pool has been told of an outcome; one that does not count ends nothing."""
        if request_id not in self._pool.entries:
            self._spans.pop(request_id, None)

    def span(
        self, name: str, request_id: str, kind: telemetry.Kind = "internal", **attributes: telemetry.Value
    ) -> telemetry.Span:
        """To be entered: a child of what the request came with, which is of no trace where that is of none."""
        parent = self._spans.get(request_id)
        if parent is None:
            return telemetry.Span()
        return telemetry.span(name, parent=parent, kind=kind, request_id=request_id, **attributes)
