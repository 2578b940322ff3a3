"""Room for what comes: the policy names who leaves, the ledgers book it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.experts.counters import Counters
from greenroom.experts.ledger import Ledger
from greenroom.policies.arrays import Keys, Mask
from greenroom.policies.events import Reason, Tier, VictimRequest
from greenroom.policies.expert_policy import ExpertPolicy


class Room:
    """Evictions of the device and the host tier.

    ``unused[experts]``: brought ahead, or coming, and not looked up since.
    """

    def __init__(
        self, policy: ExpertPolicy, device: Ledger, host: Ledger | None, slot_bytes: int, counters: Counters
    ) -> None:
        self.unused: Mask = np.zeros(len(device.state), dtype=np.bool_)
        self._policy = policy
        self._device = device
        self._host = host
        self._slot_bytes = slot_bytes
        self._counters = counters

    def on_demand(self, slots: int, incoming: Sequence[int], running: Keys) -> None:
        """Evict up to ``slots`` experts; of the ``running`` layer's own only where no one else is left."""
        evictable = self._device.evictable()
        others = evictable.copy()
        others[running] = False
        if others.any():
            evictable = others
        slots = min(slots, int(np.count_nonzero(evictable)))
        if slots:
            self.evict(self._victims(Tier.DEVICE, self._device, slots, evictable, Reason.ON_DEMAND, incoming))

    def ahead(self, incoming: int, reason: Reason, evictable: Mask) -> bool:
        """One slot for what no layer waits for yet; False where the policy finds it not worth an eviction."""
        victims = self._victims(Tier.DEVICE, self._device, 1, evictable, reason, [incoming])
        self.evict(victims)
        return len(victims) > 0

    def on_host(self, incoming: int) -> bool:
        """One host slot. Who is on the device as well leaves first: no expert is held twice without need."""
        host = self._host
        assert host is not None
        evictable = host.evictable()
        doubled = evictable & self._device.resident
        candidates = doubled if doubled.any() else evictable
        if not candidates.any():
            return False
        victims = self._victims(Tier.HOST, host, 1, candidates, Reason.ON_DEMAND, [incoming])
        for key in victims.tolist():
            host.evict(key)
        if "on_evicted" in self._policy.hooks:
            self._policy.on_evicted(Tier.HOST, victims)
        return host.free > 0

    def evict(self, keys: Keys) -> None:
        """These leave the device."""
        for key in keys.tolist():
            self._device.evict(key)
        self._counters.evictions += len(keys)
        unused = self.unused[keys]
        if unused.any():
            self._counters.prefetches_wasted += int(np.count_nonzero(unused))
            self.unused[keys] = False
        if len(keys) and "on_evicted" in self._policy.hooks:
            self._policy.on_evicted(Tier.DEVICE, keys)

    def _victims(
        self, tier: Tier, ledger: Ledger, slots: int, evictable: Mask, reason: Reason, incoming: Sequence[int]
    ) -> Keys:
        return self._policy.victims(
            VictimRequest(
                tier=tier,
                bytes_needed=slots * self._slot_bytes,
                evictable=evictable,
                resident=ledger.resident,
                reason=reason,
                incoming=np.array(incoming, dtype=np.int64),
            )
        )
