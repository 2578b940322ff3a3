"""Policies that rank the experts by what they are worth, and evict those of the least worth."""

from __future__ import annotations

from abc import abstractmethod

from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Tier, VictimRequest
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import Worth, lowest


class RankingPolicy(ExpertPolicy):
    """A replacement rule: it fetches nothing ahead. Prefetching policies use one to choose victims."""

    @abstractmethod
    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        """``[N]``: the expert worth the least leaves first. And ``[N]``: the same among equals (None: the lower key
        leaves)."""

    def victims(self, request: VictimRequest) -> Keys:
        return lowest(self.catalogue, request, *self.worth(request.tier))
