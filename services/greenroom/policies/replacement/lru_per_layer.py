"""LRU in a share of the slots for each layer: Cache-MoE, ExpertFlow's baseline."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts, Keys
from greenroom.policies.base.events import LayerRouting, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.replacement.lru import Recency


class LruPerLayer(ExpertPolicy):
    """Each layer has slots ÷ layers of its own, and evicts its own least recently used expert (Eliseev and Mazur,
    arXiv:2312.17238; "Cache-MoE" in ExpertFlow, section 5.1).

    Slots are one memory here, so a layer that needs more of them at once than its share takes them from others for that
    moment: those furthest above their share first. It is the first to give them back. What is left over by the division
    goes to whoever asks.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._recency = Recency(catalogue.size)
        self._shares: dict[Tier, float] = {}

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._shares[tier] = budget_bytes / self.catalogue.layers

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def victims(self, request: VictimRequest) -> Keys:
        catalogue = self.catalogue
        held: Counts = np.zeros(catalogue.layers, dtype=np.int64)
        resident = np.flatnonzero(request.resident)
        np.add.at(held, catalogue.layer_of[resident], catalogue.bytes_of[resident])
        np.add.at(held, catalogue.layer_of[request.incoming], catalogue.bytes_of[request.incoming])
        share = self._shares.get(request.tier, 0.0)
        over = held - share > 0
        own = np.zeros(catalogue.layers, dtype=np.bool_)
        own[catalogue.layer_of[request.incoming]] = True
        # First the layer that the room is for, where it is above its share; then others that are; then the rest.
        rank = np.where(over & own, 0, np.where(over, 1, 2))
        excess = np.where(over, share - held, 0)  # of those above their share, the furthest first
        rank_of = rank[catalogue.layer_of] + np.where(
            rank[catalogue.layer_of] == 1, excess[catalogue.layer_of] / 1e18, 0
        )
        return lowest(catalogue, request, rank_of, self._recency.last)
