"""How long fitting may take, shared among the parts that are fitted one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable


class FitTime:
    """``seconds`` from now for parts that weigh ``weights`` together; None: as long as they take.

    A part that has begun gets its share of what is left, so what one leaves is for the later ones. One whose time is up
    is to end with what it has learnt.
    """

    def __init__(self, seconds: float | None, weights: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = None if seconds is None else now() + seconds
        self._left = weights
        self._until: float | None = None

    def begin(self, weight: float = 1.0) -> None:
        if self._end is not None:
            began = self._now()
            self._until = began + max(0.0, self._end - began) * min(1.0, weight / max(self._left, weight))
            self._left -= weight

    @property
    def is_up(self) -> bool:
        return self._until is not None and self._now() >= self._until
