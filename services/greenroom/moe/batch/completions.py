"""Blocking use of the batch loop: takes many requests, and returns all answers in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from greenroom.core.errors import Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Token, TokenLogprobs
from greenroom.moe.batch.batch_loop import BatchLoop, LoopStopped

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """All that a request generated. ``logprobs`` is empty if none were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


def complete(
    loop: BatchLoop,
    requests: Iterable[GenerationRequest],
    *,
    timeout_s: float | None = None,
    on_token: Callable[[int, Token], None] | None = None,
    on_finished: Callable[[int, Finished], None] | None = None,
) -> list[Completion]:
    """Generate for every request, as many at once as the loop takes. Returns the answers in the order of requests.

    ``on_token`` and ``on_finished`` are called with the request's index, on the loop's thread. Requests that are not
    finished after ``timeout_s`` are cancelled, and returned as cancelled. Raises InvalidRequest for a request that can
    not be served, and LoopStopped if the loop ends. Before anything is raised, Ctrl-C included, all requests are
    cancelled.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    collectors: list[_Collector] = []
    numbers: list[int] = []
    try:
        for place, request in enumerate(requests):
            collector = _Collector(place, len(request.prompt_ids), on_token, on_finished)
            collectors.append(collector)
            while (left := _left(deadline)) > 0:
                try:
                    numbers.append(loop.submit(request, collector.take, wait_s=left))
                    break
                except Saturated:
                    continue
            else:
                collector.take(Finished(FinishReason.CANCELLED, collector.prompt_tokens, 0))
        for collector in collectors:
            while not collector.done.wait(_left(deadline)):
                if deadline is not None and time.monotonic() >= deadline:
                    for number in numbers:
                        loop.cancel(number)
                    deadline = None  # only the end of the step is left to wait for
                elif not loop.alive and not collector.done.is_set():
                    raise LoopStopped("the batch loop ended without an answer")
    except BaseException:
        for number in numbers:
            loop.cancel(number)
        raise
    return [collector.completion() for collector in collectors]


def _left(deadline: float | None) -> float:
    """Seconds to wait before the next look: until the deadline, but never long."""
    return _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))


class _Collector:
    """Takes one request's events on the loop's thread, to the last."""

    def __init__(
        self,
        place: int,
        prompt_tokens: int,
        on_token: Callable[[int, Token], None] | None,
        on_finished: Callable[[int, Finished], None] | None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.done = threading.Event()
        self._place = place
        self._on_token = on_token
        self._on_finished = on_finished
        self._tokens: list[Token] = []
        self._finished: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self._tokens.append(event)
            if self._on_token is not None:
                self._on_token(self._place, event)
            return
        self._finished = event
        self.done.set()
        if self._on_finished is not None:
            self._on_finished(self._place, event)

    def completion(self) -> Completion:
        if self._finished is None:
            raise RuntimeError("a completion before its end")
        return Completion(
            tuple(token.token_id for token in self._tokens),
            tuple(token.logprobs for token in self._tokens if token.logprobs is not None),
            self._finished,
        )
