"""Placement first come first served, tenants in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from greenroom.policies.placement.in_order import InOrderPlacement
from greenroom.policies.placement.placement_policy import PendingRequest, PlacementState


class FcfsPlacement(InOrderPlacement):
    """First come first served, tenants in turns: the tenant with the fewest requests on the workers is next.

    Ties go to the earlier request. So a hundred requests at once wait behind each other, and of k waiting tenants each
    gets a k-th of the places as earlier requests end. A tenant's own requests keep their order. No tenant starves: the
    first request of a tenant without any on the workers waits only for earlier first requests. With one tenant it is
    the order of arrival.
    """

    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        pending = state.pending
        if all(request.tenant == pending[0].tenant for request in pending):
            return pending
        taken = Counter(placed.request.tenant for worker in state.workers for placed in worker.running)
        taken.update(queued.tenant for worker in state.workers for queued in worker.queued)
        turns: list[int] = []
        for request in pending:
            turns.append(taken[request.tenant])
            taken[request.tenant] += 1
        return [pending[place] for place in sorted(range(len(pending)), key=turns.__getitem__)]
