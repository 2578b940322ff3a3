"""Policies that rank the experts by what they are worth, and let the least worthy go."""

from __future__ import annotations

from abc import abstractmethod

from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Tier, VictimRequest
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import Worth, lowest


class RankingPolicy(ExpertPolicy):
    """A replacement rule: fetches nothing ahead. Policies that do take one of these for who makes room."""

    @abstractmethod
    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        """``[N]``: who is worth the least leaves first; and what decides among equals (None: the lower key leaves)."""

    def victims(self, request: VictimRequest) -> Keys:
        return lowest(self.catalogue, request, *self.worth(request.tier))
