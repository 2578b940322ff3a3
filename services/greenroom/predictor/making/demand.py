"""Which predictors are asked for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Which = tuple[str, str]
"""A model and a kind."""


@dataclass(slots=True)
class Demand:
    """What was asked for within the last ``within_s`` seconds, ``now`` not included where it is just that long ago."""

    within_s: float
    _last: dict[Which, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Of those that have not lapsed yet."""
        return len(self._last)

    def ask(self, which: Which, now: float) -> bool:
        """Whether that is new: it was not asked for, or too long ago."""
        new = not self.holds(which, now)
        self._last[which] = now
        return new

    def holds(self, which: Which, now: float) -> bool:
        return now - self._last.get(which, -math.inf) < self.within_s

    def lapse(self, now: float) -> list[Which]:
        """Those that were asked for too long ago, which are then known no more."""
        gone = [which for which in self._last if not self.holds(which, now)]
        for which in gone:
            del self._last[which]
        return gone

    def forget(self, which: Which) -> None:
        self._last.pop(which, None)
