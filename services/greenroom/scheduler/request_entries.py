"""What a pool's scheduler knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.messages import Lost, Outcome, Task
from greenroom.core.messages.journal import TokenLogprobArrays
from greenroom.policies.placement.placement_policy import PendingRequest


class RequestStage(Enum):
    """Where a request is on its way. It never leaves ENDING."""

    WAITING = "waiting"
    PLACED = "placed"
    """Run was called on ``worker``. Only the worker knows whether it runs."""
    LOSING = "losing"
    """Its worker was lost; nothing is attempted before the journal says so."""
    GIVING_UP = "giving up"
    """It is given up. Its dead letter is being written; the outcome follows."""
    ENDING = "ending"
    """Its outcome was appended. It ends when the journal has it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a worker says at a run's end. ``reason``: stop, length, cancelled, failed or expired. ``approximated``,
    ``outputs``, ``invalid``, ``prompt_logprobs``: as in Outcome."""

    reason: FinishReason
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobArrays | None = None
    message: str = ""
    approximated: float = 0.0
    outputs: InferenceOutputs | None = None
    invalid: bool = False
    prompt_logprobs: TokenLogprobArrays | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """``task`` is None where only a cancel of the request is known, or that its record is unreadable.

    ``offsets``: the records of ``tasks`` that wait for its end. ``again_at``: when to call Run again after a broken
    call, else None. ``begun``: it has run before, so it is no longer shed for its waiting. ``appending``: the record
    whose append is under way; ``asked_ms``: when such an append last began or ended. ``estimates_ms``: the latency from
    acceptance to end that each estimator gave when the request was placed. ``unsure``: the attempts under which a
    worker was lost that had many requests and had not said which of them it was executing.
    """

    request_id: str
    order: int
    task: Task | None = None
    pending: PendingRequest | None = None
    offsets: list[int] = field(default_factory=list)
    stage: RequestStage = RequestStage.WAITING
    worker: str | None = None
    attempt: Attempt | None = None
    placed_ms: float = 0.0
    again_at: float | None = None
    losses: set[Attempt] = field(default_factory=set)
    unsure: set[Attempt] = field(default_factory=set)
    loses_unsure: bool = False
    """While it is LOSING: whether that loss is unsure."""
    outcome: Outcome | None = None
    appending: Lost | Outcome | None = None
    asked_ms: float = 0.0
    begun: bool = False
    estimates_ms: dict[str, float] = field(default_factory=dict)
