"""Which kinds of which models are asked for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Which = tuple[str, str]
"""A model and a kind."""


@dataclass(slots=True)
class Demand:
    """What was asked for less than ``within_s`` seconds ago. At most ``most`` are remembered."""

    within_s: float
    most: int = 1024
    _last: dict[Which, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Those that were not dropped by ``lapse`` yet."""
        return len(self._last)

    def ask(self, which: Which, now: float) -> bool:
        """Whether that is new: it was not asked for, or too long ago. Where there is no room for it nothing is."""
        new = not self.holds(which, now)
        if new and len(self._last) >= self.most:
            self.lapse(now)
            if len(self._last) >= self.most:
                return False
        self._last[which] = now
        return new

    def holds(self, which: Which, now: float) -> bool:
        return now - self._last.get(which, -math.inf) < self.within_s

    def lapse(self, now: float) -> list[Which]:
        """Drop those that were asked for too long ago, and say which."""
        gone = [which for which in self._last if not self.holds(which, now)]
        for which in gone:
            del self._last[which]
        return gone
