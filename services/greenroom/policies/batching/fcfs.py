"""Continuous batching, first come first served."""

from __future__ import annotations

from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchLimits,
    BatchPolicy,
    BatchState,
    Rows,
    StepPlan,
    WaitingSequence,
)
from greenroom.policies.batching.in_order import admit_in_order


class FcfsBatching(BatchPolicy):
    """Continuous batching, first come first served, with chunked prefill under a token budget a step.

    Decode rows come first, since a client waits for each. Then come the prompts in order of admission, then new ones
    in order of arrival, each with as large a chunk as the step still holds. A waiting request is admitted when its
    whole KV reservation fits and the step has room for one of its rows.

    The head of the queue blocks: where its reservation does not fit, nothing behind it is admitted either. Overtaking
    would fill a little more of the KV now. But under steady load small requests would keep the memory that a large one
    waits for. Blocking bounds its wait by the ends of the running requests. A request larger than the whole KV budget
    is refused at once, so it blocks none.
    """

    def decide(self, state: BatchState) -> BatchDecision:
        limits = state.limits
        left = limits.tokens_per_step
        rows: list[Rows] = []

        for running in state.running:
            if running.phase is Phase.DECODE and not running.in_flight and left:
                rows.append(Rows(running.sequence, 1, Phase.DECODE))
                left -= 1
        for running in state.running:
            if running.phase is Phase.PREFILL and left:
                left -= _take_chunk(rows, running.sequence, running.prefill_left, left, limits)

        def take(waiting: WaitingSequence) -> bool:
            nonlocal left
            if left:
                left -= _take_chunk(rows, waiting.sequence, waiting.prefill_tokens, left, limits)
                return True
            return False

        admitted, refuse = admit_in_order(state, take)
        steps = (StepPlan(tuple(rows)),) if rows else ()
        return BatchDecision(steps=steps, admit=tuple(waiting.sequence for waiting in admitted), refuse=tuple(refuse))


def _take_chunk(rows: list[Rows], sequence: int, wanted: int, left: int, limits: BatchLimits) -> int:
    tokens = min(wanted, left, limits.prefill_chunk or wanted)
    rows.append(Rows(sequence, tokens, Phase.PREFILL))
    return tokens
