"""What became of the prefetches to one tier."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Keys, Mask


class PrefetchUse:
    """Counts the prefetches to one tier: those begun, those used, and those wasted (evicted unused).

    ``unused[experts]``: prefetched, arrived or still on its way, and not used since.
    """

    __slots__ = ("begun", "unused", "used", "wasted")

    def __init__(self, experts: int) -> None:
        self.unused: Mask = np.zeros(experts, dtype=np.bool_)
        self.begun = 0
        self.used = 0
        self.wasted = 0

    def begin(self, key: int) -> None:
        self.unused[key] = True
        self.begun += 1

    def take_back(self, key: int) -> None:
        """It was withdrawn before it began to move: it does not count."""
        self.unused[key] = False
        self.begun -= 1

    def fail(self, key: int) -> None:
        self.unused[key] = False

    def use(self, keys: Keys | int) -> None:
        self.used += self._settle(keys)

    def evict(self, keys: Keys) -> None:
        self.wasted += self._settle(keys)

    def _settle(self, keys: Keys | int) -> int:
        settled = int(np.count_nonzero(self.unused[keys]))
        if settled:
            self.unused[keys] = False
        return settled
