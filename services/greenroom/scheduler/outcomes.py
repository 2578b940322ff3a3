"""How a request ends: its outcome is appended to the journal, and counts when it is read there."""

from __future__ import annotations

import msgspec

from greenroom.core.generation import FinishReason
from greenroom.core.messages import Outcome, Request
from greenroom.scheduler.effects import Append, CancelRun, Effect
from greenroom.scheduler.pool_state import PoolState
from greenroom.scheduler.request_entries import Entry, RequestStage, RunResult

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
TOO_LARGE = "what it generated is larger than the journal takes; ask for fewer tokens or fewer log-probabilities"
_MESSAGE_CHARS = 4096


def end(
    pool: PoolState,
    entry: Entry,
    reason: FinishReason,
    now: float,
    *,
    message: str = "",
    result: RunResult | None = None,
) -> list[Effect]:
    """End the request with this outcome. ``result``: of its run, where a run came to its end."""
    if entry.stage is RequestStage.ENDING:
        return []
    effects: list[Effect] = []
    if entry.stage is RequestStage.PLACED and result is None and entry.worker is not None and entry.attempt is not None:
        effects.append(CancelRun(entry.worker, entry.request_id, entry.attempt))
    pool.waiting.pop(entry.request_id, None)
    entry.stage = RequestStage.ENDING
    entry.outcome = _outcome(pool.epoch, entry, reason, message, result)
    return effects + append_outcome(pool, entry, now)


def append_outcome(pool: PoolState, entry: Entry, now: float) -> list[Effect]:
    """Append the outcome of a request that ends, under the present epoch."""
    assert entry.outcome is not None
    if entry.outcome.epoch != pool.epoch:
        entry.outcome = msgspec.structs.replace(entry.outcome, epoch=pool.epoch)
    entry.asked_ms, entry.appending = now, entry.outcome
    return [Append(entry.outcome)]


def outcome_append_ended(pool: PoolState, entry: Entry, outcome: Outcome, now: float, *, refused: bool) -> list[Effect]:
    """The append has ended. An outcome that the journal refuses is replaced by a failure without tokens."""
    entry.appending, entry.asked_ms = None, now
    pool.watch(entry)
    if refused and outcome.message != TOO_LARGE:
        pool.count("outcome_refused")
        entry.outcome = msgspec.structs.replace(
            outcome,
            reason=FinishReason.FAILED,
            message=TOO_LARGE,
            token_ids=(),
            logprobs=None,
            prompt_logprobs=None,
            approximated=0.0,
            outputs=None,
        )
        return append_outcome(pool, entry, now)
    return append_outcome(pool, entry, now) if outcome.epoch != pool.epoch else []


def _outcome(epoch: int, entry: Entry, reason: FinishReason, message: str, result: RunResult | None) -> Outcome:
    request = None if entry.task is None else entry.task.request
    generated = result if reason in COMPLETED else None
    return Outcome(
        epoch=epoch,
        request_id=entry.request_id,
        reason=reason,
        message=message[:_MESSAGE_CHARS],
        token_ids=() if generated is None else generated.token_ids,
        logprobs=None if generated is None else generated.logprobs,
        attempt=None if result is None else entry.attempt,
        digest=b"" if request is None else request.digest,
        keyed=request is not None and request.keyed,
        prompt_tokens=len(request.prompt_ids) if isinstance(request, Request) else 0,
        task_type="" if entry.task is None else entry.task.task_type,
        worker="" if result is None else entry.worker or "",
        queue_ms=max(0.0, entry.placed_ms - request.accepted_ms) if request and entry.placed_ms else 0.0,
        approximated=0.0 if generated is None else generated.approximated,
        outputs=None if generated is None else generated.outputs,
        invalid=result is not None and result.invalid,
        prompt_logprobs=None if generated is None else generated.prompt_logprobs,
    )
