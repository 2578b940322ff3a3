"""Least recently used."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts, Keys
from greenroom.policies.base.events import LayerRouting, Reason, Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth

_FILLED = -(1 << 40)
"""Before any use."""


class Recency:
    """When each expert was used last, in uses since the start. Experts of one layer are used one after the other."""

    def __init__(self, size: int) -> None:
        self.last: Counts = np.zeros(size, dtype=np.int64)
        self._uses = 1
        self._filled = 0

    def use(self, experts: Keys) -> Counts:
        """Count a use of each, in this order. Returns their times."""
        times = np.arange(self._uses, self._uses + len(experts))
        self.last[experts] = times
        self._uses += len(experts)
        return times

    def arrived(self, transfer: Transfer) -> None:
        """An expert fetched ahead counts as used on arrival. Otherwise it would be the next to leave.

        Those of the first fill leave before all that were used or fetched ahead, in the order in which they came.
        """
        if transfer.reason is Reason.FILL:
            if self.last[transfer.expert] <= 0:
                self.last[transfer.expert] = _FILLED + self._filled
                self._filled += 1
        elif transfer.reason is not Reason.ON_DEMAND:
            self.last[transfer.expert] = self._uses
            self._uses += 1


class Lru(RankingPolicy):
    """Evicts the expert that was last used longest ago."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._recency = Recency(catalogue.size)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._recency.last, None
