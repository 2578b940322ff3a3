"""First in, first out."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth


class Fifo(RankingPolicy):
    """Evicts the expert that came into the tier first, however often it was used since."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._arrived: dict[Tier, Counts] = {
            tier: np.zeros(catalogue.size, dtype=np.int64) for tier in (Tier.DEVICE, Tier.HOST)
        }
        self._arrivals = 0

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._arrivals += 1
        self._arrived[transfer.target][transfer.expert] = self._arrivals

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._arrived[tier], None
