"""LRU in a share of the slots for each layer: Cache-MoE, ExpertFlow's baseline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import NO_KEYS, Counts, Keys, Mask
from greenroom.policies.base.events import LayerRouting, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.replacement.lru import Recency


class LruPerLayer(ExpertPolicy):
    """Each layer has slots ÷ layers of its own, and evicts its own least recently used expert (Eliseev and Mazur,
    arXiv:2312.17238; "Cache-MoE" in ExpertFlow, section 5.1). Where records differ in size, both are counted by size
    class: a layer has a share of the slots that its experts can be in.

    The slots of a class are one memory here. So a layer that needs more of them at once than its share takes them from
    others for that moment: those furthest above their share first. It is the first to give them back. What is left over
    by the division goes to whoever asks.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._recency = Recency(catalogue.size)
        self._sizes = SlotSizes(catalogue)
        self._has: Mask = np.zeros((self._sizes.classes, catalogue.layers), dtype=np.bool_)
        """``[classes, layers]``: where the layer has experts of the class."""
        self._has[self._sizes.class_of, catalogue.layer_of] = True
        self._shares = dict.fromkeys((Tier.DEVICE, Tier.HOST), np.zeros(catalogue.layers))
        """``[layers]``: bytes."""

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        sizes = self._sizes
        of_class = sizes.places(sizes.within(budget_bytes)) * sizes.bytes_of
        self._shares[tier] = of_class / self._has.sum(axis=1) @ self._has

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def victims(self, request: VictimRequest) -> Keys:
        layer_of, bytes_of = self.catalogue.layer_of, self.catalogue.bytes_of
        if request.bytes_needed > int(bytes_of[request.evictable].sum()):
            return NO_KEYS
        held: Counts = np.zeros(self.catalogue.layers, dtype=np.int64)
        for keys in (np.flatnonzero(request.resident), request.incoming):
            np.add.at(held, layer_of[keys], bytes_of[keys])
        own = np.zeros(self.catalogue.layers, dtype=np.bool_)
        own[layer_of[request.incoming]] = True
        left, chosen, freed = request.evictable.copy(), list[int](), 0
        while freed < request.bytes_needed:
            above: NDArray[np.float64] = held - self._shares[request.tier]
            key = self._next(np.flatnonzero(left), above, own)
            left[key] = False
            chosen.append(key)
            held[layer_of[key]] -= bytes_of[key]
            freed += int(bytes_of[key])
        needed = list[int]()
        for key in reversed(chosen):  # where sizes differ, the first ones may have become needless
            if freed - int(bytes_of[key]) >= request.bytes_needed:
                freed -= int(bytes_of[key])
            else:
                needed.append(key)
        return np.array(needed[::-1], dtype=np.int64)

    def _next(self, candidates: Keys, above: NDArray[np.float64], own: Mask) -> int:
        """Of an ``own`` layer that is ``above[layers]`` its share, then of the one furthest above it, then any."""
        of = self.catalogue.layer_of[candidates]
        group = np.where(above[of] <= 0, 2, np.where(own[of], 0, 1))
        furthest = np.where(group == 1, -above[of], 0)
        return int(candidates[np.lexsort((self._recency.last[candidates], furthest, group))[0]])
