"""Requests that come when they come, through a batch engine: on the engine's own clock, real or virtual."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Token
from greenroom.moe.batch.batch_engine import BatchEngine

_BACKGROUND_S = 0.02
"""As the batch loop: so often an engine without requests goes on with what it has to do besides."""


class Clock(Protocol):
    """``now`` in seconds; ``rest_until`` lets time pass while nothing runs."""

    def now(self) -> float: ...

    def rest_until(self, now: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def rest_until(self, now: float) -> None:
        time.sleep(max(0.0, now - self.now()))


@dataclass(slots=True)
class Answered:
    """One request: when it came, and when each token of its answer did, in seconds of the clock; and how it ended."""

    came_s: float
    tokens_s: list[float] = field(default_factory=list)
    end: Finished | None = None

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.came_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None of an answer of one."""
        count = len(self.tokens_s) - 1
        return (self.tokens_s[-1] - self.tokens_s[0]) / count if count else None

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens: ITL."""
        return [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


def serve(
    batch: BatchEngine,
    arrivals: Sequence[tuple[float, GenerationRequest]],
    clock: Clock,
    on_ended: Callable[[], object] = lambda: None,
) -> list[Answered]:
    """All of ``arrivals``, ascending in seconds from now on. A request that came during a step joins after it, as in
    the batch loop, and has waited since it came. ``on_ended`` is called as each ends. Raises RuntimeError where one is
    not answered whole.
    """
    begin = clock.now()
    waiting = deque((begin + at, request) for at, request in arrivals)
    answered: list[Answered] = []
    while waiting or batch.busy:
        while waiting and waiting[0][0] <= clock.now():
            came_s, request = waiting.popleft()
            answered.append(Answered(came_s))
            sequence = batch.new_sequence(request, _taker(answered[-1], clock, on_ended))
            sequence.submitted_at = came_s
            batch.add(sequence)
        if batch.busy:
            if not batch.step():
                raise RuntimeError("requests wait and the engine moves nothing: a defect of greenroom")
        elif waiting:
            soon = clock.now() + _BACKGROUND_S if batch.idle() else waiting[0][0]
            clock.rest_until(min(soon, waiting[0][0]))
    for one in answered:
        if one.end is None or one.end.reason is not FinishReason.LENGTH:
            raise RuntimeError(f"a request has no whole answer: {one.end}")
    return answered


def _taker(answer: Answered, clock: Clock, on_ended: Callable[[], object]) -> Callable[[Event], None]:
    def take(event: Event) -> None:
        if isinstance(event, Token):
            answer.tokens_s.append(clock.now())
        else:
            answer.end = event
            on_ended()

    return take
