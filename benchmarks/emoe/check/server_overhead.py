"""What a server takes beside its engine, from what it really took beyond the engine's steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.emoe.scheduling.step_costs import ServingOverhead


@dataclass(frozen=True, slots=True)
class Beyond:
    """``ms`` that were not the engine's, of one request or of many together, in ``steps`` steps with ``rows``
    sequences."""

    ms: float
    steps: int
    rows: int


def overhead_of(alone: Sequence[Beyond], crowds: Sequence[Beyond]) -> ServingOverhead:
    """What a server takes beside its engine; nothing is below 0.

    A line through requests ``alone`` gives the time of a request, and of a step with one sequence. ``crowds`` then show
    how much of the latter each further sequence adds: the other steps hide the time of all requests but one. The median
    crowd counts, so that a disturbed one does not.
    """
    request_ms, each = _line([one.steps for one in alone], [one.ms for one in alone])
    of_rows = [
        (one.ms - request_ms - each * one.steps) / (one.rows - one.steps) for one in crowds if one.rows > one.steps
    ]
    row_ms = min(max(0.0, statistics.median(of_rows)), each) if of_rows else 0.0
    return ServingOverhead(request_ms=request_ms, step_ms=each - row_ms, row_ms=row_ms)


def _line(steps: Sequence[int], ms: Sequence[float]) -> tuple[float, float]:
    """Milliseconds at no step, and for each step, by Theil and Sen's line: a few slow requests do not move it."""
    points = list(zip(steps, ms, strict=True))
    slopes = [(b - a) / (n - m) for (m, a), (n, b) in combinations(points, 2) if n != m]
    each = max(0.0, statistics.median(slopes)) if slopes else 0.0
    return max(0.0, statistics.median(one - each * count for count, one in points)), each
