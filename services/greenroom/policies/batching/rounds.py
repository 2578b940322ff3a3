"""Rounds: several forwards that together move every sequence that decodes once."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import BatchState, Rows, RunningSequence


def decoding(state: BatchState) -> list[RunningSequence]:
    """The running sequences that decode, in order of admission."""
    return [running for running in state.running if running.phase is Phase.DECODE]


def balanced_sizes(rows: int, most: int) -> list[int]:
    """The fewest groups of at most ``most`` rows, of sizes that differ by one at most, the larger ones first."""
    groups = -(-rows // most)
    return [rows // groups + (place < rows % groups) for place in range(groups)]


def in_admission_order(running: Sequence[RunningSequence], most: int) -> list[list[Rows]]:
    """Their decode rows in balanced groups of at most ``most``. No sequence: one group without rows."""
    groups, start = [], 0
    for size in balanced_sizes(len(running), most):
        groups.append([Rows(each.sequence, 1, Phase.DECODE) for each in running[start : start + size]])
        start += size
    return groups or [[]]
