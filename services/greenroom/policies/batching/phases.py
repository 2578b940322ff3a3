"""A strategy for each phase: prompts whole and together, as many as moving experts hides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchPolicy,
    BatchState,
    Rows,
    StepPlan,
    WaitingSequence,
)
from greenroom.policies.batching.in_order import admit_in_order
from greenroom.policies.batching.preemption import make_room
from greenroom.policies.batching.rounds import decoding, in_admission_order

_MOST_HOLD = 1e6


class PhasesBatching(BatchPolicy):
    """For models whose experts do not all fit. A prompt's step moves nearly all missing experts, however few its rows.
    So a prompt runs whole, which is one such step, and other prompts join it as long as their rows cost nothing.

    - Every decoding sequence has its row in every step. These rows ride along: the step brings their experts anyway.
      Where a forward may not hold all of them, they run in several, and prompts join the last one.
    - The first prompt of a step runs with as many rows as the step holds. Further prompts join it while the step has
      fewer than R* rows (``StepCosts.balanced_rows``). Where R* is not known, only the room in the step bounds them.
    - Only ``tokens_per_step`` splits a prompt: ``prefill_chunk`` is not applied. A prompt that fits whole into a step
      of its own waits for that instead of joining with a part.
    - Order is that of arrival, and the head of the queue blocks, as in FcfsBatching and for its reasons.

    ``hold`` = a: while others decode, prompts are held back until the sum of their waits is a · what their step adds ·
    decoding rows, so until holding has cost them a times what it spares the others. Where costs are not known none is
    held. A prompt that would miss its TTFT SLO ends the hold. The sum of the waits grows with time and the other side
    is bounded, so no prompt is held for ever.

    ``apart``: prompts and decode rows in two steps, one after the other, as DuoServe-MoE (section 5) runs single
    requests.
    """

    applies_prefill_chunk = False

    def __init__(self, *, apart: bool = False, hold: float = 0.0) -> None:
        if not 0 <= hold <= _MOST_HOLD:
            raise InvalidConfig("hold", hold, f"a number from 0 (no prompt is held back) to {_MOST_HOLD:g}")
        self._apart = apart
        self._hold = hold
        self.reads_waits = hold > 0

    def decide(self, state: BatchState) -> BatchDecision:
        state, preempt = make_room(state)
        limits = state.limits
        *before, last = in_admission_order(decoding(state), limits.decode_rows)
        decode_rows = sum(map(len, before)) + len(last)
        beside = 0 if self._apart else len(last)
        prompts = _Prompts(limits.tokens_per_step, beside, state.costs.balanced_rows)
        for running in state.running:
            if running.phase is Phase.PREFILL and not prompts.take(running.sequence, running.prefill_left):
                break
        begun = bool(prompts.rows)

        admitted, refuse = admit_in_order(state, lambda waiting: prompts.take(waiting.sequence, waiting.prefill_tokens))
        rows = prompts.rows
        if admitted and not begun and decode_rows and self._holds(state, admitted, rows, decode_rows, len(before)):
            admitted, rows = [], []
        parts = [rows, *before, last] if self._apart else [*before, last + rows]
        return BatchDecision(
            steps=tuple(StepPlan(tuple(part)) for part in parts if part),
            admit=tuple(waiting.sequence for waiting in admitted),
            refuse=tuple(refuse),
            preempt=preempt,
        )

    def _holds(
        self, state: BatchState, admitted: list[WaitingSequence], rows: Sequence[Rows], decoding: int, before: int
    ) -> bool:
        """Whether the prompts of ``admitted``, which could start now, wait on while others decode.

        ``before``: forwards of decode rows alone that a round has before the last.
        """
        costs = state.costs
        own = sum(part.tokens for part in rows)
        seconds = costs.prompt_step_seconds(own if self._apart else own + decoding)
        if not self._hold or seconds is None:
            return False
        decode_ms = 1000.0 * (costs.decode_seconds or 0.0)
        step_ms = 1000.0 * seconds
        # The next chance comes a round later. There the prompt's step is the round's last, or with `apart` its first.
        latest_ms = step_ms + (before + 1 + (0 if self._apart else before)) * decode_ms
        if any(
            waiting.slo_ttft_ms is not None and waiting.waited_ms + latest_ms >= waiting.slo_ttft_ms
            for waiting in state.waiting[: state.limits.max_running - len(state.running)]
        ):
            return False
        adds_ms = step_ms if self._apart else max(0.0, step_ms - decode_ms)
        return sum(waiting.waited_ms for waiting in admitted) < self._hold * adds_ms * decoding


class _Prompts:
    """The rows of prompts in one step. ``limit``: rows of the step. ``beside``: those that others have in it.

    ``free``: up to how many rows of the step prompts join one that is in it (None: as many as there is room for).
    """

    def __init__(self, limit: int, beside: int, free: float | None) -> None:
        self.rows: list[Rows] = []
        self._whole = limit - beside
        self._left = limit - beside
        self._limit = limit
        self._free = math.inf if free is None else free

    def take(self, sequence: int, tokens: int) -> bool:
        """Give the prompt rows, if it gets any: all of its ``tokens`` unless no step holds them."""
        if not self._left:
            return False
        if self.rows:
            if self._limit - self._left >= self._free:
                return False
            if self._left < tokens <= self._whole:
                return False
        taken = min(tokens, self._left)
        self.rows.append(Rows(sequence, taken, Phase.PREFILL))
        self._left -= taken
        return True
