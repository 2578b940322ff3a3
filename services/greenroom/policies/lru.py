"""Least recently used."""

from __future__ import annotations

import numpy as np

from greenroom.policies.arrays import Keys
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import LayerRouting, Reason, Transfer, VictimRequest
from greenroom.policies.expert_policy import ExpertPolicy
from greenroom.policies.selection import lowest


class Lru(ExpertPolicy):
    """Evicts the expert whose last use is longest ago.

    The experts of a layer count as used one after the other, in the order of the event. One that was brought ahead
    of its use counts as used on arrival, or it would be the next to go.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._used = np.zeros(catalogue.size, dtype=np.int64)
        self._uses = 1

    def on_layer_routed(self, routing: LayerRouting) -> None:
        count = len(routing.experts)
        self._used[routing.experts] = np.arange(self._uses, self._uses + count)
        self._uses += count

    def on_transfer_done(self, transfer: Transfer) -> None:
        if transfer.reason is not Reason.ON_DEMAND:
            self._used[transfer.expert] = self._uses
            self._uses += 1

    def victims(self, request: VictimRequest) -> Keys:
        return lowest(self.catalogue, request, self._used)
