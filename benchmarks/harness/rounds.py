"""Interleaved rounds: arms take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")


def in_turns(
    arms: Sequence[A],
    rounds: int,
    seconds: float,
    *,
    warm_up: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, A]]:
    """Rounds 1 to ``rounds``, after a round 0 where arms ``warm_up``. Each round begins with another arm.

    No new round begins that would probably end after ``seconds``. The first measured one always runs.
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
    """The arms in their order, beginning with the ``by``-th, so that none always follows the same."""
    start = by % len(arms) if arms else 0
    return [*arms[start:], *arms[:start]]
