"""Evictions: the policy names the victims, the ledgers book them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import Ledger
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import Reason, Tier, VictimRequest
from greenroom.policies.base.expert_policy import ExpertPolicy


class Evictor:
    """Evictions of the device and the host tier.

    ``unused[experts]``: brought ahead to the device, or coming, and not looked up since. ``unused_on_host[experts]``:
    brought ahead to the host and no further, or coming, and not fetched to the device since.
    """

    def __init__(
        self, policy: ExpertPolicy, device: Ledger, host: Ledger | None, slot_bytes: int, counters: Counters
    ) -> None:
        self.unused: Mask = np.zeros(len(device.state), dtype=np.bool_)
        self.unused_on_host: Mask = np.zeros(len(device.state), dtype=np.bool_)
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
        """A device slot for what no layer waits for yet; False where the policy finds it not worth an eviction."""
        victims = self._victims(Tier.DEVICE, self._device, 1, evictable, reason, [incoming])
        self.evict(victims)
        return len(victims) > 0

    def on_host(self, incoming: int) -> bool:
        """One host slot for what goes on to the device; False where nobody may leave."""
        assert self._host is not None
        evictable = self._host.evictable()
        return bool(evictable.any()) and self.ahead_on_host(incoming, Reason.ON_DEMAND, evictable)

    def ahead_on_host(self, incoming: int, reason: Reason, evictable: Mask) -> bool:
        """One host slot, as ``ahead``. Who is on the device as well leaves first: nobody is held twice without need."""
        assert self._host is not None
        doubled = evictable & self._device.resident
        candidates = doubled if doubled.any() else evictable
        victims = self._victims(Tier.HOST, self._host, 1, candidates, reason, [incoming])
        self.evict_from_host(victims)
        return len(victims) > 0

    def evict(self, keys: Keys) -> None:
        """These leave the device."""
        self._counters.evictions += len(keys)
        self._counters.prefetches_wasted += self._leave(Tier.DEVICE, self._device, self.unused, keys)

    def evict_from_host(self, keys: Keys) -> None:
        assert self._host is not None
        self._counters.host_prefetches_wasted += self._leave(Tier.HOST, self._host, self.unused_on_host, keys)

    def _leave(self, tier: Tier, ledger: Ledger, unused: Mask, keys: Keys) -> int:
        """Returns how many of them had been of no use."""
        for key in keys.tolist():
            ledger.evict(key)
        wasted = int(np.count_nonzero(unused[keys]))
        if wasted:
            unused[keys] = False
        if len(keys) and "on_evicted" in self._policy.hooks:
            self._policy.on_evicted(tier, keys)
        return wasted

    def goes_to_device(self, key: int) -> None:
        """A fetch to the device begins: what brought the expert to the host, or is about to, has served."""
        if self.unused_on_host[key]:
            self.unused_on_host[key] = False
            self._counters.host_prefetches_used += 1

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
