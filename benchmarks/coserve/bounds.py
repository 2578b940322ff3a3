"""What no system can beat: bytes that have to be read, work that has to be done. Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from greenroom.core.coe_profile import BatchTimes
from greenroom.profiling.coe.replayed_throughput import Board


class Bound(NamedTuple):
    """``switches``: the fewest loads. ``link_ms``: for the fewest bytes. ``work_ms``: in the best batches,
    with the number of executors that takes least."""

    switches: int
    link_ms: float
    work_ms: float

    @property
    def least_ms(self) -> float:
        return max(self.link_ms, self.work_ms)

    @property
    def limits(self) -> str:
        return "link" if self.link_ms > self.work_ms else "work"


def bound_of(board: Board, memory_bytes: int) -> Bound:
    """Of a burst of all of the board's requests, with whatever is best in memory when it begins."""
    uses = Counter(expert for path in board.paths for expert in path)
    free, switches = memory_bytes, 0
    for size in sorted(board.bytes_of[expert] for expert in uses):
        if size <= free:
            free -= size
        else:
            switches += 1
    bytes_ = sum(board.bytes_of[expert] for expert in uses)
    ms_a_byte = min(board.costs[expert].load_ms / board.bytes_of[expert] for expert in uses)
    counts = min(board.costs[expert].by_executors.keys() for expert in uses)
    return Bound(
        switches,
        max(0, bytes_ - memory_bytes) * ms_a_byte,
        min(_work_ms(board, uses, count) / count for count in counts),
    )


def _work_ms(board: Board, uses: Counter[int], executors: int) -> float:
    total = 0.0
    for expert, requests in uses.items():
        total += requests * _least_ms_a_request(board.costs[expert].by_executors[executors], requests)
    return total


def _least_ms_a_request(times: BatchTimes, requests: int) -> float:
    """In batches of whatever size is best, of at most so many."""
    return min(times.ms_of(size) / size for size in range(1, min(requests, times.most) + 1))
