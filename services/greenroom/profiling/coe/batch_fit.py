"""From times of batches to CoServe's K, B and maximum batch size. Pure.

CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), sections 4.2 and 4.5, Figs 5 and 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from greenroom.core.coe_profile import BatchTimes

PLATEAU: Final = 0.05
"""So near to the best time a request counts as a plateau."""
_LEAST_POINTS: Final = 2


class Line(NamedTuple):
    """A batch of n takes ``batch_ms`` + ``request_ms`` · n: the paper's B and K."""

    request_ms: float
    batch_ms: float

    def ms_of(self, requests: int) -> float:
        return self.batch_ms + self.request_ms * requests


def largest_useful_batch(ms_by_batch: Mapping[int, float], within: float = PLATEAU) -> int:
    """The smallest batch whose time a request is at most ``within`` above the best; the paper says "plateaus"."""
    best = min(ms / size for size, ms in ms_by_batch.items())
    return min(size for size, ms in ms_by_batch.items() if ms / size <= best * (1 + within))


def fit_line(ms_by_batch: Mapping[int, float]) -> Line:
    """The line of least squares, of those whose K and B are not negative."""
    sizes = np.array(sorted(ms_by_batch), dtype=np.float64)
    times = np.array([ms_by_batch[int(size)] for size in sizes])
    centred = sizes - sizes.mean()
    spread = float(centred @ centred)
    slope = float(centred @ (times - times.mean())) / spread if spread else 0.0
    if slope < 0:
        return Line(0.0, float(times.mean()))
    start = float(times.mean() - slope * sizes.mean())
    if start < 0 or not spread:
        return Line(float(sizes @ times) / float(sizes @ sizes), 0.0)
    return Line(slope, start)


def batch_times(ms_by_batch: Mapping[int, float]) -> BatchTimes:
    """K and B are those of the sizes up to the maximum batch, of two at least, because no larger one is run."""
    most = largest_useful_batch(ms_by_batch)
    sizes = sorted(ms_by_batch)
    run = [size for place, size in enumerate(sizes) if size <= most or place < _LEAST_POINTS]
    line = fit_line({size: ms_by_batch[size] for size in run})
    return BatchTimes(ms_by_batch=dict(ms_by_batch), request_ms=line.request_ms, batch_ms=line.batch_ms, most=most)


def furthest_off(times: BatchTimes) -> float:
    """By which share of its time the line misses a batch of at most ``most``, at worst."""
    line = Line(times.request_ms, times.batch_ms)
    run = [(size, ms) for size, ms in times.ms_by_batch.items() if size <= times.most]
    return max(abs(line.ms_of(size) - ms) / ms for size, ms in run)
