"""Between measured points: straight lines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping


def between(points: Mapping[int, float], at: float) -> float:
    """On the straight line between the two nearest points, or that of the nearest one beyond them all."""
    ordered = sorted(points.items())
    if at <= ordered[0][0]:
        return ordered[0][1]
    for (low, below), (high, above) in itertools.pairwise(ordered):
        if at <= high:
            return below + (above - below) * (at - low) / (high - low)
    return ordered[-1][1]
