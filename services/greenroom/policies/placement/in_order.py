"""What first come first served and earliest deadline first share: one queue, served from its head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from greenroom.policies.placement.placement_policy import (
    PendingRequest,
    Placement,
    PlacementDecision,
    PlacementPolicy,
    PlacementState,
    Shed,
)


class InOrderPlacement(PlacementPolicy):
    """Places requests in the order of ``ordered``, each on the worker with the fewest requests.

    Ties go to the worker with the most free KV, then by name. The head of the queue blocks, as in FcfsBatching and for
    the same reason. Expired requests, and those larger than every worker's whole KV memory, are shed and block none.
    Without a worker everything else stays pending.
    """

    needs_groups = False

    @abstractmethod
    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        """The pending requests in the order in which they are to be served."""

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        place: list[Placement] = []
        shed: list[Shed] = []
        load = {w.worker: len(w.running) + w.queue_length for w in state.workers}
        kv_free = {w.worker: w.kv_free for w in state.workers}
        room = {w.worker: w.max_running + w.max_queued - load[w.worker] for w in state.workers}
        largest = max((w.kv_total for w in state.workers), default=None)
        blocked = False
        for request in self.ordered(state):
            if now_ms >= request.deadline_ms:
                shed.append(Shed(request.request_id, "expired"))
            elif largest is not None and request.kv_most > largest:
                shed.append(Shed(request.request_id, "unservable"))
            elif not blocked:
                able = [
                    w.worker
                    for w in state.workers
                    if room[w.worker] > 0 and request.kv_need <= kv_free[w.worker] and request.kv_most <= w.kv_total
                ]
                if not able:
                    blocked = True
                    continue
                chosen = min(able, key=lambda name: (load[name], -kv_free[name], name))
                place.append(Placement(request.request_id, chosen))
                load[chosen] += 1
                room[chosen] -= 1
                kv_free[chosen] -= request.kv_need
        return PlacementDecision(place=tuple(place), shed=tuple(shed))
