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
from greenroom.policies.batching.rounds import decoding, in_admission_order


class FcfsBatching(BatchPolicy):
    """Continuous batching, first come first served, with chunked prefill under a token budget a step.

    Decode rows come first, since a client waits for each. Then come the prompts in order of admission, then new ones
    in order of arrival, each with as large a chunk as the step still holds. A waiting request is admitted when its
    whole KV reservation fits and the step has room for one of its rows.

    The head of the queue blocks: where its reservation does not fit, nothing behind it is admitted either. Overtaking
    would fill a little more of the KV now. But under steady load small requests would keep the memory that a large one
    waits for. Blocking bounds its wait by the ends of the running requests. A request larger than the whole KV budget
    is refused at once, so it blocks none.

    Where a forward may not hold all decode rows, they run in several, in order of admission, the prompts with the last.
    """

    def decide(self, state: BatchState) -> BatchDecision:
        return planned(state, in_admission_order(decoding(state), state.limits.decode_rows))


def planned(state: BatchState, groups: list[list[Rows]], prompts_at: int = -1) -> BatchDecision:
    """The round of these groups of decode rows, one forward each, in this order.

    Prompts join the group ``prompts_at``. Where it is full and more sequences run than a forward holds, they have a
    forward of their own at the end.
    """
    limits = state.limits
    plans = [list(group) for group in groups]
    if len(plans[prompts_at]) == limits.tokens_per_step < limits.max_running:
        plans.append([])
        prompts_at = -1
    rows = plans[prompts_at]
    left = limits.tokens_per_step - len(rows)

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
    steps = tuple(StepPlan(tuple(plan)) for plan in plans if plan)
    return BatchDecision(steps=steps, admit=tuple(waiting.sequence for waiting in admitted), refuse=tuple(refuse))


def _take_chunk(rows: list[Rows], sequence: int, wanted: int, left: int, limits: BatchLimits) -> int:
    tokens = min(wanted, left, limits.prefill_chunk or wanted)
    rows.append(Rows(sequence, tokens, Phase.PREFILL))
    return tokens
