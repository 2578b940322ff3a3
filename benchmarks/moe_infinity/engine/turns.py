"""What an arm did with some prompts once, and arms that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.harness.turn import Turn

A = TypeVar("A")


@dataclass
class ServedTurn(Turn):
    """``request_seconds``: of each prompt, from when the engine had it to its last token.

    ``on_demand``: fetches that a layer waited for. ``prefetches_wasted``: fetched ahead and gone without a use.
    ``policy_seconds``: by the policy's method, where that was looked at.
    """

    request_seconds: list[float] = field(default_factory=list)
    prefetches_wasted: int = 0
    on_demand: int = 0
    policy_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def per_token(self) -> list[float]:
        """Seconds a token of each prompt."""
        return [seconds / max(1, len(ids)) for seconds, ids in zip(self.request_seconds, self.ids, strict=True)]

    @classmethod
    def of_answer(cls, values: dict[str, Any]) -> ServedTurn:
        """As a child process says it."""
        return cls(**values)


def in_turns(
    arms: Sequence[A],
    rounds: int,
    seconds: float,
    *,
    warm_up: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, A]]:
    """Rounds 1 to ``rounds``, after a round 0 where arms ``warm_up``, each beginning with another arm, so that none
    always follows the same. No new round begins that would probably end after ``seconds``, but the first measured one
    does in any case.
    """
    begun = clock()
    for round_ in range(0 if warm_up else 1, rounds + 1):
        round_begun = clock()
        for arm in rotated(arms, round_):
            yield round_, arm
        now = clock()
        if round_ and now - begun + (now - round_begun) > seconds:
            return


def rotated(arms: Sequence[A], by: int) -> list[A]:
    """Beginning with another one."""
    start = by % len(arms) if arms else 0
    return [*arms[start:], *arms[:start]]
