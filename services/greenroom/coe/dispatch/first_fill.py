"""What is in memory before the first request (CoServe, ASPLOS 2025, section 4.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def dealt(usage: NDArray[np.float64], sizes: Sequence[int], budgets: Sequence[int]) -> list[list[int]]:
    """By memory, the experts that it begins with, the most wanted first.

    Experts are dealt in turn, by descending probability of use. One that does not fit where it is its turn goes to the
    next memory that has room. ``usage[N]``, ``sizes[N]``: of the experts. ``budgets``: bytes of each memory.
    """
    free = list(budgets)
    hands: list[list[int]] = [[] for _ in budgets]
    turn = 0
    for expert in np.argsort(-usage, kind="stable").tolist():
        for tried in range(len(free)):
            memory = (turn + tried) % len(free)
            if sizes[expert] <= free[memory]:
                hands[memory].append(expert)
                free[memory] -= sizes[expert]
                turn = memory + 1
                break
    return hands
