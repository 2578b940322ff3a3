"""What the prefetching policies share: a replacement rule of their choice, which spares wanted experts."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.core.errors import UnknownName
from greenroom.policies.base.array_types import NO_KEYS, Keys, Mask, Scores
from greenroom.policies.base.events import LayerRouting, Reason, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth, lowest
from greenroom.policies.replacement.decayed_frequency import Decayed
from greenroom.policies.replacement.lfu import Lfu
from greenroom.policies.replacement.lru import Lru
from greenroom.policies.replacement.next_use import NextUse

RETENTIONS: Final[dict[str, type[RankingPolicy]]] = {"decayed": Decayed, "lfu": Lfu, "lru": Lru, "next-use": NextUse}


class PrefetchingPolicy(ExpertPolicy):
    """Wants experts ahead of their layer; ``retention`` names the rule that ranks the victims.

    Wanted experts leave last: an expert that was fetched ahead stays until its layer, however rarely it was used, and
    no prefetch displaces another. A prefetch displaces no expert worth more than one that the running layer still
    holds. With ``evict`` False prefetches only fill free slots.
    """

    only_ahead = True

    def __init__(self, catalogue: Catalogue, *, retention: str, evict: bool) -> None:
        """Raises UnknownName for a retention that is not known."""
        super().__init__(catalogue)
        self.retention: RankingPolicy = self._rule(retention)
        self._may_evict: Mask | None = None if evict else np.zeros(catalogue.size, dtype=np.bool_)
        self._wanted: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        self._wants_any = False

    def _rule(self, name: str) -> RankingPolicy:
        if name not in RETENTIONS:
            raise UnknownName("retention", name, RETENTIONS)
        return RETENTIONS[name](self.catalogue)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self.retention.on_layer_routed(routing)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self.retention.on_transfer_done(transfer)

    def victims(self, request: VictimRequest) -> Keys:
        worth, tie = self.retention.worth(request.tier)
        if not self._wants_any or request.tier is not Tier.DEVICE:
            return lowest(self.catalogue, request, worth, tie)
        kept = self._kept(worth)
        victims = lowest(self.catalogue, request, kept, tie)
        if request.reason is Reason.PREFETCH and len(victims):
            dearest = kept[victims].max()
            running = request.resident & ~request.evictable
            if (
                dearest == np.inf
                or self._waits_for(kept[running], dearest)
                or not self._worthier(request.incoming, worth, dearest)
            ):
                return NO_KEYS
        return victims

    def _kept(self, worth: Worth) -> Worth:
        """``worth[N]``, raised for the experts that leave last."""
        return np.where(self._wanted, np.inf, worth)

    def _waits_for(self, running: Worth, victim: float) -> bool:
        """Whether a prefetch is to wait until experts that the ``running`` layer holds, of this worth, can leave in
        place of a victim of that worth."""
        return bool((running < victim).any())

    def _worthier(self, incoming: Keys, worth: Worth, victim: float) -> bool:
        """Whether ``incoming`` may displace a victim of this worth. Most rules can not tell, and allow it."""
        return True

    def _publish(self, priority: Scores) -> None:
        """Want the experts of positive ``priority[N]``. The policy no longer writes to that array."""
        self._wanted = priority > 0
        self._wants_any = bool(self._wanted.any())
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        self.prefetch = Prefetch(generation, priority, self._may_evict)
