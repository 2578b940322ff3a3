"""The rows of the result: an arm's turns by round, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.reporting.statistics import Spread
from benchmarks.harness.turn import Trace, Turn

GREENROOM = "greenroom"
RESIDENT = "100%"
THIRD = "33%"
ORACLES = ("belady", "belady-ahead")
"""Policies that know the future: to compare with, never the best."""


@dataclass
class Row:
    """One arm over all rounds. Rows of the same ``stage`` and ``model`` took turns.

    ``share``: of the experts in memory, as it was asked for; empty for a system without such a setting. ``facts``: what
    its child said of itself. ``turns``: by round. ``trace``: of the round that warmed up. ``limit_bytes`` and
    ``cgroup_peak_bytes``: of its memory cgroup. ``error``: why it has no more turns.
    """

    stage: str
    model: str
    system: str
    share: str = ""
    policy: str = ""
    concurrency: int = 1
    instrumented: bool = False
    limit_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    turns: dict[int, Turn] = field(default_factory=dict)
    trace: Trace | None = None
    cgroup_peak_bytes: int | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """As a person reads it, without the model."""
        parts = [self.system, self.share, self.policy]
        parts += [f"×{self.concurrency}"] if self.concurrency > 1 else []
        return " ".join(part for part in parts if part)

    @property
    def tokens_per_s(self) -> Spread | None:
        return Spread.of([turn.tokens / turn.seconds for turn in self.turns.values()])

    @property
    def peak_bytes(self) -> int | None:
        """Resident set at most, over the measured turns."""
        return max((turn.peak_bytes for turn in self.turns.values()), default=None)

    @property
    def bytes_moved(self) -> float | None:
        """Median of the turns."""
        return statistics.median(turn.bytes_moved for turn in self.turns.values()) if self.turns else None

    @property
    def hit_rate(self) -> float | None:
        look_ups = sum(turn.look_ups for turn in self.turns.values())
        return sum(turn.hits for turn in self.turns.values()) / look_ups if look_ups else None

    @property
    def belady_bytes(self) -> int | None:
        return None if self.trace is None else self.trace.belady_bytes

    @property
    def moved_over_belady(self) -> float | None:
        moved, least = self.bytes_moved, self.belady_bytes
        return moved / least if moved is not None and least else None


def paired(first: Row | None, second: Row | None, ratio: Callable[[Turn, Turn], float]) -> Spread | None:
    """``ratio`` of the turns of each round that both have; None where there is none."""
    if first is None or second is None:
        return None
    rounds = first.turns.keys() & second.turns.keys()
    return Spread.of([ratio(first.turns[number], second.turns[number]) for number in sorted(rounds)])


def speed_ratio(first: Row | None, second: Row | None) -> Spread | None:
    """Tokens/s of the first over those of the second, round by round."""
    return paired(first, second, lambda a, b: (a.tokens / a.seconds) / (b.tokens / b.seconds))


def agreement(row: Row, reference: Row | None) -> float | None:
    """Share of the prompts whose tokens equal the reference's; None if they ran different ones."""
    if reference is None or not row.turns or not reference.turns:
        return None
    mine, theirs = next(iter(row.turns.values())).ids, next(iter(reference.turns.values())).ids
    pairs = list(zip(mine, theirs, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first row with these attributes that has turns."""
    for row in rows:
        if row.turns and all(getattr(row, name) == value for name, value in wanted.items()):
            return row
    return None


def fastest(rows: Iterable[Row]) -> Row | None:
    """By the median of tokens/s, of those that have turns."""
    measured = [(spread.median, number, row) for number, row in enumerate(rows) if (spread := row.tokens_per_s)]
    return max(measured)[2] if measured else None
