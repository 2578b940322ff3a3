"""Continuous batching, first come first served."""

from __future__ import annotations

from dataclasses import replace

from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchPolicy,
    BatchState,
    Rows,
    StepPlan,
    WaitingSequence,
)
from greenroom.policies.batching.in_order import Refused, admit_in_order
from greenroom.policies.batching.preemption import make_room
from greenroom.policies.batching.rounds import decoding, in_admission_order

_LITTLE_ROOM = 1 / 4
"""Of a forward's rows: prompts that want more than what is left of less than that run in a forward of their own."""


class FcfsBatching(BatchPolicy):
    """Continuous batching, first come first served, with chunked prefill under a token budget a step.

    Decode rows come first, since a client waits for each. Then come the prompts in order of admission, then new ones
    in order of arrival, each with as large a chunk as the step still holds. A waiting request is admitted when the KV
    that it is expected to need fits and the step has room for one of its rows.

    The head of the queue blocks: where its need does not fit, nothing behind it is admitted either. Overtaking
    would fill a little more of the KV now. But under steady load small requests would keep the memory that a large one
    waits for. Blocking bounds its wait by the ends of the running requests. A request larger than the whole KV budget
    is refused at once, so it blocks none.

    Where a forward may not hold all decode rows, they run in several, in order of admission, the prompts with the last.
    """

    def decide(self, state: BatchState) -> BatchDecision:
        state, preempt = make_room(state)
        decision = planned(state, in_admission_order(decoding(state), state.limits.decode_rows))
        return replace(decision, preempt=preempt) if preempt else decision


def planned(state: BatchState, groups: list[list[Rows]], prompts_at: int = -1) -> BatchDecision:
    """The round of these groups of decode rows, one forward each, in this order.

    Prompts join the group ``prompts_at``. Where rounds are planned and it has little room, of which some prompt wants
    more, they have a forward of their own at the end: a few rows a round would keep them for hundreds of rounds.
    """
    limits = state.limits
    plans = [list(group) for group in groups]
    room = limits.tokens_per_step - len(plans[prompts_at])
    prompts, admitted, refuse = _prompts_within(state, room)
    if prompts.cut and limits.plans_rounds and room < _LITTLE_ROOM * limits.tokens_per_step:
        prompts, admitted, refuse = _prompts_within(state, limits.tokens_per_step)
        plans.append(prompts.rows)
    else:
        plans[prompts_at] += prompts.rows
    steps = tuple(StepPlan(tuple(plan)) for plan in plans if plan)
    return BatchDecision(steps=steps, admit=tuple(waiting.sequence for waiting in admitted), refuse=tuple(refuse))


def _prompts_within(state: BatchState, room: int) -> tuple[_Prompts, list[WaitingSequence], Refused]:
    """Chunks of the running prompts and of those that start, with whom `admit_in_order` says."""
    prompts = _Prompts(room, state.limits.prefill_chunk)
    for running in state.running:
        if running.phase is Phase.PREFILL:
            prompts.take(running.sequence, running.prefill_left)
    return prompts, *admit_in_order(state, lambda waiting: prompts.take(waiting.sequence, waiting.prefill_tokens))


class _Prompts:
    """Chunks of prompts in a forward that has ``room`` rows for them. ``cut``: some had less than it wanted."""

    def __init__(self, room: int, chunk: int | None) -> None:
        self.rows: list[Rows] = []
        self.cut = False
        self._room = room
        self._chunk = chunk

    def take(self, sequence: int, tokens: int) -> bool:
        """Give the prompt rows. False: there are none left."""
        wanted = min(tokens, self._chunk or tokens)
        taken = min(wanted, self._room)
        self.cut |= taken < wanted
        if taken:
            self.rows.append(Rows(sequence, taken, Phase.PREFILL))
            self._room -= taken
        return taken > 0
