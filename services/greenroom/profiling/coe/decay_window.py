"""How many experts memory should hold, the rest being for intermediates: CoServe's decay window. Pure.

CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), section 4.4, Eqs 1 to 3, Figs 11 and 18. The readings are in
docs/decisions/0031.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

INITIAL_PERCENT: Final = 15.0
ERROR_MARGIN: Final = 0.05
_AS_GOOD: Final = 0.98
"""So near to the best throughput is as good."""
_LEAST_OF_A_LINE: Final = 2
_GRID: Final = 6

Throughput = Callable[[int], float]
"""Requests a second with so many experts in memory; 0 where that can not run."""


class Window(NamedTuple):
    """Between ``lower`` and ``upper`` experts, in the order of descending probability."""

    lower: int
    upper: int


class Choice(NamedTuple):
    """``window``: where the sliding stopped. ``drawn``: the paper's choice in it. ``residents``: ours.

    ``per_s``: by the number of experts, all that was tried.
    """

    window: Window
    drawn: int
    residents: int
    per_s: dict[int, float]


def decay_windows(experts: int, initial_percent: float = INITIAL_PERCENT) -> list[Window]:
    """All windows over so many experts, the first one at 0. They end at ``experts``, and each has one at least.

    u₀ = W₀, uᵢ = uᵢ₋₁ + W₀ · dⁱ with d = 1 − W₀ / 100 (Eq. 1). All windows sum to 100, so W₀ is percent of the experts.

    Raises ValueError unless 0 < ``initial_percent`` <= 100.
    """
    if not 0 < initial_percent <= 100:
        raise ValueError(f"the first window has {initial_percent} %, and may have more than 0 and at most 100")
    decay = 1 - initial_percent / 100
    windows, lower, size, upper = [], 0, initial_percent, 0.0
    while lower < experts:
        upper += size
        size *= decay
        end = min(experts, max(round(upper * experts / 100), lower + 1))
        windows.append(Window(lower, end))
        lower = end
    return windows


def expected_next(per_s: Sequence[float]) -> float:
    """f(N + 1) of the line f(N) = kN + b through the first N throughputs (Eq. 2). ``per_s``: two of them at least."""
    numbers = np.arange(1, len(per_s) + 1, dtype=np.float64)
    slope, start = np.polyfit(numbers, np.asarray(per_s, dtype=np.float64), 1)
    return float(slope * (len(per_s) + 1) + start)


def deviates(per_s: Sequence[float], actual: float, margin: float = ERROR_MARGIN) -> bool:
    """Whether sliding stops at the window that gave ``actual``; ``per_s``: of those before it (Eq. 3).

    Two throughputs make no trend yet. A trend that has fallen to nothing is one that stops.
    """
    if len(per_s) < _LEAST_OF_A_LINE:
        return False
    expected = expected_next(per_s)
    return expected <= 0 or (expected - actual) / expected > margin


def choose(
    experts: int,
    throughput: Throughput,
    seed: int,
    *,
    also: Iterable[int] = (),
    initial_percent: float = INITIAL_PERCENT,
    margin: float = ERROR_MARGIN,
) -> Choice:
    """``experts``: how many fit into the memory at most. ``throughput`` is asked once for each number.

    ``also``: numbers that are tried whatever the window is.

    Ours is the largest of the numbers that are as good as the best: a burst shows little of what loads cost a stream.
    """
    per_s: dict[int, float] = {}

    def tried(residents: int) -> float:
        if residents not in per_s:
            per_s[residents] = throughput(residents)
        return per_s[residents]

    windows, before = decay_windows(experts, initial_percent), list[float]()
    while True:
        window = windows[len(before)]
        actual = tried(window.upper)
        if deviates(before, actual, margin) or len(before) + 1 == len(windows):
            break
        before.append(actual)
    drawn = random.Random(seed).randint(max(1, window.lower), window.upper)
    tried(drawn)
    search(windows[len(before) :], tried)
    for number in also:
        tried(number)
    best = max(per_s.values())
    residents = max(number for number, one in per_s.items() if one >= _AS_GOOD * best)
    return Choice(window, drawn, residents, per_s)


def search(windows: Sequence[Window], tried: Throughput) -> None:
    """Ask for numbers in the first window, more closely around the best of them.

    The trend bends long before throughput falls if it rises ever less. So while the best number is at the window's
    upper end, the next one is searched too.
    """
    for window in windows:
        low, high = max(1, window.lower), window.upper
        while True:
            numbers = sorted({int(number) for number in np.linspace(low, high, _GRID).round()})
            best = max(numbers, key=lambda number: (tried(number), -number))
            if len(numbers) > high - low:
                break
            at = numbers.index(best)
            low, high = numbers[max(0, at - 1)], numbers[min(len(numbers) - 1, at + 1)]
        if best != window.upper:
            break
