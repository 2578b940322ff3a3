"""Neighbour-aware replacement."""

from __future__ import annotations

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Keys
from greenroom.policies.base.events import LayerRouting, Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.replacement.lru import Recency


class NeighbourAware(RankingPolicy):
    """LRU in which a use keeps the expert's neighbours too: those at most ``radius`` indices away in its layer.

    MoE-Infinity's baseline (§8.4, ZeRO-Infinity's) "enforces the neighbors of experts to be cached together"; the
    paper says no more, so the rule is ours. An expert is as recent as the most recent use among itself and its
    neighbours. Of equals, the one that was itself used longest ago leaves. Radius 0 is LRU.
    """

    def __init__(self, catalogue: Catalogue, *, radius: int = 1) -> None:
        """Raises InvalidConfig for a negative radius."""
        if radius < 0:
            raise InvalidConfig("radius", radius, "0 or more")
        super().__init__(catalogue)
        self._own = Recency(catalogue.size)
        self._shared: Counts = np.zeros(catalogue.size, dtype=np.int64)
        self._neighbours = _neighbours(catalogue, radius)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        times = self._own.use(routing.experts)
        # Times ascend, and of repeated targets the last assignment stays: the most recent use.
        self._shared[self._neighbours[routing.experts]] = times[:, None]

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._own.arrived(transfer)
        self._shared[transfer.expert] = max(self._shared[transfer.expert], self._own.last[transfer.expert])

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._shared, self._own.last


def _neighbours(catalogue: Catalogue, radius: int) -> Keys:
    """``[N, 2 radius + 1]``: each expert's neighbours and itself, clipped to its layer (so some repeat)."""
    offsets = np.arange(-radius, radius + 1)
    first = catalogue.first[catalogue.layer_of][:, None]
    last = catalogue.first[catalogue.layer_of + 1][:, None] - 1
    around: Keys = np.arange(catalogue.size)[:, None] + offsets
    return np.minimum(np.maximum(around, first), last)
