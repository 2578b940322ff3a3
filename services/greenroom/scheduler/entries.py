"""What a pool's scheduler knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.messages import Lost, Outcome, Task
from greenroom.core.messages.journal import TokenLogprobArrays
from greenroom.policies.placement.placement_policy import PendingRequest


class Stage(Enum):
    """Where a request is on its way. Never back from ENDING."""

    WAITING = "waiting"
    PLACED = "placed"
    """Run was called on ``worker``; whether it runs, the worker knows."""
    LOSING = "losing"
    """Its worker was lost; nothing is attempted before the journal says so."""
    BURYING = "burying"
    """Given up; its dead letter is being written, before its outcome."""
    ENDING = "ending"
    """Its outcome was appended; it ends when the journal has it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a worker says at a run's end. ``reason``: stop, length, cancelled or failed. ``approximated``: as the
    outcome has it."""

    reason: FinishReason
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobArrays | None = None
    message: str = ""
    approximated: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """``task`` is None for a request of which only a cancel, or that it is unreadable, is known.

    ``offsets``: the records of ``tasks`` that wait for its end. ``again_at``: when to call Run again after a broken
    call, None where nothing is to be done. ``begun``: it has run before, so it is no longer shed for its waiting.
    ``appending``: the record that it waits for, while the append of that is on its way; ``asked_ms``: when such an
    append last began or ended. ``estimates_ms``: by estimator, from its acceptance
    to its end, as it looked when it was placed.
    """

    request_id: str
    order: int
    task: Task | None = None
    pending: PendingRequest | None = None
    offsets: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    worker: str | None = None
    attempt: Attempt | None = None
    placed_ms: float = 0.0
    again_at: float | None = None
    losses: set[Attempt] = field(default_factory=set)
    outcome: Outcome | None = None
    appending: Lost | Outcome | None = None
    asked_ms: float = 0.0
    begun: bool = False
    estimates_ms: dict[str, float] = field(default_factory=dict)
