"""What the batch loop counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from greenroom.core.generation import FinishReason


@dataclass(slots=True)
class BatchStats:
    """Counts since the start, and what is there now. Seconds are of the loop's own clock.

    ``rows``: prefill and decode rows together, each run counted, also of steps that were run again.
    ``isolated_steps``: steps that failed as a whole and were run request by request. ``queue_seconds``: sum over
    the ``started`` requests of their time between submission and admission. ``finished``: requests by the reason of
    their end. ``kv_shortages``: times that memory for a request's keys and values could not be had within the budget.
    ``kv_free_bytes``: what may be reserved now; none while memory is short. ``audit_failures`` and
    ``observer_failures`` are defects; both are logged.
    """

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    isolated_steps: int = 0
    submitted: int = 0
    started: int = 0
    queue_seconds: float = 0.0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    kv_shortages: int = 0
    audits: int = 0
    audit_failures: int = 0
    observer_failures: int = 0
    waiting: int = 0
    running: int = 0
    kv_reserved_bytes: int = 0
    kv_peak_bytes: int = 0
    kv_budget_bytes: int = 0
    kv_free_bytes: int = 0

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows

    def snapshot(self) -> BatchStats:
        """A copy that no longer changes."""
        return replace(self, finished=dict(self.finished))
