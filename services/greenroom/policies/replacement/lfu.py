"""Least frequently used: over all time, or since the expert was last loaded."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts, Keys
from greenroom.policies.base.events import LayerRouting, Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.replacement.lru import Recency


class Lfu(RankingPolicy):
    """Evicts the expert used in the fewest steps since the start; of equals, the least recently used.

    A step in which several rows use an expert counts once: what matters is how often it must be resident.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._counts: Counts = np.zeros(catalogue.size, dtype=np.int64)
        self._recency = Recency(catalogue.size)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._counts[routing.experts] += 1
        self._recency.use(routing.experts)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._counts, self._recency.last


class LfuReset(RankingPolicy):
    """LFU in which an expert's count is lost when it leaves the tier: the papers' baseline.

    MoE-Infinity (§8.4) describes BrainStorm's: it "only counts for access frequency for the expert in the cache.
    When the expert is evicted, the counter is reset". Each tier counts for itself. Of equals, the least recently
    used leaves.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._counts: dict[Tier, Counts] = {
            tier: np.zeros(catalogue.size, dtype=np.int64) for tier in (Tier.DEVICE, Tier.HOST)
        }
        self._recency = Recency(catalogue.size)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        for counts in self._counts.values():
            counts[routing.experts] += 1
        self._recency.use(routing.experts)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        self._counts[tier][experts] = 0

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._counts[tier], self._recency.last
