"""First in, first out."""

from __future__ import annotations

import numpy as np

from greenroom.policies.arrays import Counts, Keys
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import Tier, Transfer, VictimRequest
from greenroom.policies.expert_policy import ExpertPolicy
from greenroom.policies.selection import lowest


class Fifo(ExpertPolicy):
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

    def victims(self, request: VictimRequest) -> Keys:
        return lowest(self.catalogue, request, self._arrived[request.tier])
