"""What the batch loop counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from greenroom.core.generation import FinishReason


@dataclass(slots=True)
class BatchStats:
    """Counts since the start, and the present state. Seconds are of the loop's clock.

    ``rows``: prefill and decode rows that have run; rows that ran again count again. ``isolated_steps``: steps that
    failed as a whole and were run request by request. ``queue_seconds``: sum over the ``started`` requests of their
    time between submission and admission. ``finished``: requests by the reason of their end. ``kv_shortages``: how
    often the system lacked memory for keys and values within the budget. ``kv_free_bytes``: what can be reserved now, 0
    while memory is short. ``preemptions``: how often a sequence gave up its KV for others; ``recomputed_rows``: the
    prefill rows that ran again for that, which are among ``prefill_rows``. ``decide_seconds``: what the batch policy
    took; ``paths_seconds``: what foretelling routing paths took, and ``path_failures`` how often it failed.
    ``audit_failures`` and ``observer_failures`` are defects; both are logged.
    """

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    isolated_steps: int = 0
    decide_seconds: float = 0.0
    paths_seconds: float = 0.0
    path_failures: int = 0
    submitted: int = 0
    started: int = 0
    queue_seconds: float = 0.0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    kv_shortages: int = 0
    preemptions: int = 0
    recomputed_rows: int = 0
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
        """A copy that does not change."""
        return replace(self, finished=dict(self.finished))
