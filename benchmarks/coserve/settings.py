"""The best number of executors and share of the memory for a system, found on a sample of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from greenroom.coe.simulation.simulate import Served, Way
from greenroom.profiling.coe.replayed_throughput import Board, Scheme, replay

EXECUTORS: Final = (1, 2, 3, 4)
SHARES: Final = (1.0, 0.75)
"""Of the experts that fit beside full batches."""
AS_GOOD: Final = 0.99


class Setting(NamedTuple):
    """``expert_bytes``: of all executors."""

    executors: int
    expert_bytes: int


def run_with(
    board: Board,
    scheme: Scheme,
    setting: Setting,
    memory_bytes: int,
    load_ms: Sequence[float] | None = None,
    ways: Sequence[Way] | None = None,
) -> Served | None:
    return replay(board, scheme, setting.executors, memory_bytes, setting.expert_bytes, load_ms=load_ms, ways=ways)


def candidates(
    board: Board, memory_bytes: int, executors: Sequence[int] = EXECUTORS, shares: Sequence[float] = SHARES
) -> list[Setting]:
    found = []
    for count in executors:
        most = board.fitting_beside_full_batches(memory_bytes, count) or board.fitting(memory_bytes, count)
        if most:
            numbers = sorted({max(1, round(share * most)) for share in shares}, reverse=True)
            found += [Setting(count, board.expert_bytes(number, count)) for number in numbers]
    return found


def best_setting(settings: Sequence[Setting], per_s: Callable[[Setting], float]) -> Setting:
    """That of the fewest executors, and of these the most experts, which serves as much as any other, to 1 %."""
    served = {setting: per_s(setting) for setting in settings}
    best = max(served.values())
    good = [setting for setting, own in served.items() if own >= AS_GOOD * best]
    return min(good, key=lambda setting: (setting.executors, -setting.expert_bytes))
