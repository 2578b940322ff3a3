"""Settings of the batch loop."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig
from greenroom.policies.batching.batch_policy import BatchLimits

SCORED_ROWS = 16
"""So many rows of a forward may want logits, however few requests run: a prompt that is scored wants one for each."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """``kv_budget_bytes``: for the keys and values of all running requests together.

    ``max_model_len``: limit of prompt and answer in tokens (None: what the model and the KV budget allow).
    ``tokens_per_step``: limit of rows in a forward. ``max_running``: limit of requests that run at once.
    ``max_waiting``: how many more may wait. ``prefill_chunk``: limit of one request's prompt rows in a step (None: what
    the step holds). ``rows_per_forward``: limit of decode rows in a forward (None: what it holds).
    ``plans_rounds``: the batch policy plans rounds, so more requests may run than a forward has rows.
    """

    kv_budget_bytes: int
    max_model_len: int | None = None
    tokens_per_step: int = 512
    max_running: int = 64
    max_waiting: int = 256
    prefill_chunk: int | None = None
    rows_per_forward: int | None = None
    plans_rounds: bool = False

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise InvalidConfig("max_waiting", self.max_waiting, "0 or more")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidConfig("max_model_len", self.max_model_len, "at least 2: one token in, one out")
        self.limits(self.kv_budget_bytes)

    @property
    def logit_rows(self) -> int:
        """The most rows of a forward whose logits are computed."""
        return most_logit_rows(self.tokens_per_step, self.max_running)

    def limits(self, kv_total: int) -> BatchLimits:
        return BatchLimits(
            self.tokens_per_step,
            self.max_running,
            kv_total,
            self.prefill_chunk,
            self.rows_per_forward,
            self.plans_rounds,
        )


def most_logit_rows(step_rows: int, max_running: int) -> int:
    """Of a forward with ``step_rows`` rows: one for each running request, or enough to score a prompt by."""
    return min(step_rows, max(max_running, SCORED_ROWS))
