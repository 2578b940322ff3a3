"""A server of batches: which requests go together and when, and how long each then takes (§8.2).

Batches really run, one after the other. Idle time is not slept through: the clock of arrivals is set forward to the
next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import Ask

SETTLE_S = 0.1
"""Of an idle time that is really slept: what was still on its way to memory has landed by then."""


@dataclass(frozen=True, slots=True)
class Batching:
    """A batch begins when it has ``most`` requests or its first one has waited for ``wait_s``.

    If the server is busy then, the batch begins when it is free, with the first ``most`` that have come by then.
    """

    most: int = 16
    wait_s: float = 1.0

    def form(self, arrivals: Sequence[float], free_s: float) -> tuple[float, int]:
        """When the next batch begins, and how many of the requests at ``arrivals`` (ascending, at least one) are in it.

        The server is free from ``free_s`` on.
        """
        full = arrivals[self.most - 1] if len(arrivals) >= self.most else float("inf")
        begins = max(free_s, min(full, arrivals[0] + self.wait_s))
        return begins, sum(at <= begins for at in arrivals[: self.most])


@dataclass(frozen=True, slots=True)
class Served:
    """A request: when it came, when its batch began, and when it had its last token, in seconds."""

    task: str
    arrived_s: float
    began_s: float
    ended_s: float
    tokens: int

    @property
    def per_token_s(self) -> float:
        """From its arrival on."""
        return (self.ended_s - self.arrived_s) / self.tokens


def serve(
    arrivals: Sequence[float],
    asks: Sequence[Ask],
    answer: Callable[[Sequence[Ask]], ServedTurn],
    batching: Batching | None = None,
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Served]:
    """All requests, in the order in which they came. ``answer`` runs one batch."""
    batching = batching or Batching()
    served: list[Served] = []
    free_s = 0.0
    while len(served) < len(asks):
        first = len(served)
        begins, count = batching.form(arrivals[first:], free_s)
        if begins > free_s:
            sleep(min(SETTLE_S, begins - free_s))
        batch = asks[first : first + count]
        turn = answer(batch)
        for ask, at, seconds, ids in zip(batch, arrivals[first:], turn.request_seconds, turn.ids, strict=False):
            served.append(Served(ask.task, at, begins, begins + seconds, len(ids)))
        free_s = begins + turn.seconds
    return served
