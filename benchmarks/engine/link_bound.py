"""The bound of a run: no faster than its computing, nor than its bytes over the link."""

from __future__ import annotations

from benchmarks.harness.reporting.statistics import Spread
from benchmarks.harness.rows import Row, paired
from benchmarks.harness.turn import Turn


def bound_seconds(turn: Turn, resident: Turn) -> float | None:
    """The longer of two times: what the resident run computed, and the bytes moved over the link as it was then.

    None where the link was not measured.
    """
    return None if turn.link is None else max(resident.seconds, turn.bytes_moved / turn.link)


def over_bound(row: Row | None, resident: Row | None) -> Spread | None:
    """Time over that bound, round by round; ``resident`` ran the same stream with the same concurrency."""
    if row is None or any(turn.link is None for turn in row.turns.values()):
        return None
    return paired(row, resident, lambda turn, whole: turn.seconds / (bound_seconds(turn, whole) or turn.seconds))
