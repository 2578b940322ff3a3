"""Placement earliest deadline first."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.policies.placement.in_order import InOrderPlacement
from greenroom.policies.placement.placement_policy import PendingRequest, PlacementState


class EdfPlacement(InOrderPlacement):
    """Earliest deadline first: higher ``priority`` before lower, then the earlier ``wanted_at_ms``, then the earlier
    arrival.

    Optimal on one server where all deadlines can be met (Liu and Layland, JACM 1973, §7). Where they can not, it serves
    late requests before those that could still be in time. A request without SLOs waits behind those that have some,
    at most until its deadline or the queue's bound.
    """

    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        return sorted(state.pending, key=lambda request: (-request.priority, wanted_at_ms(request)))


def wanted_at_ms(request: PendingRequest) -> float:
    """When its first SLO (to the first token, or to the end) is over; without SLOs its deadline."""
    slos = (slo for slo in (request.slo_ttft_ms, request.slo_e2e_ms) if slo is not None)
    return min((request.arrived_ms + slo for slo in slos), default=request.deadline_ms)
