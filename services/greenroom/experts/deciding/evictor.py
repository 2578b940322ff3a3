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
    """Frees slots of the device tier and of the host tier, if there is one, for incoming experts: by evicting others of
    their size class.
    """

    def __init__(self, policy: ExpertPolicy, device: Ledger, host: Ledger | None, counters: Counters) -> None:
        self._policy = policy
        self._device = device
        self._ledgers = {Tier.DEVICE: device} if host is None else {Tier.DEVICE: device, Tier.HOST: host}
        self._counters = counters

    def free_on_demand(self, slots: int, incoming: Sequence[int], running: Keys) -> None:
        """Free up to ``slots`` device slots for ``incoming`` experts of one layer. An expert of the ``running`` layer
        is evicted only if no other can be.
        """
        evictable = self._device.evictable_in(self._device.size_class(incoming[0]))
        others = evictable.copy()
        others[running] = False
        if np.count_nonzero(others):
            evictable = others
        slots = min(slots, int(np.count_nonzero(evictable)))
        if slots:
            self.evict(Tier.DEVICE, self._victims(Tier.DEVICE, slots, evictable, Reason.ON_DEMAND, incoming))

    def free_one(self, tier: Tier, incoming: int, reason: Reason, evictable: Mask) -> bool:
        """Free one slot for an expert that no layer waits for in this tier. False: the policy refuses. ``evictable``:
        experts of its size class.

        On the host, experts that the device holds too are evicted first.
        """
        if tier is Tier.HOST:
            copies = evictable & self._device.resident
            evictable = copies if copies.any() else evictable
        victims = self._victims(tier, 1, evictable, reason, [incoming])
        self.evict(tier, victims)
        return len(victims) > 0

    def free_host_slot(self, incoming: int) -> bool:
        """Free one host slot for an expert bound for the device. False: none can be evicted."""
        ledger = self._ledgers[Tier.HOST]
        evictable = ledger.evictable_in(ledger.size_class(incoming))
        return bool(np.count_nonzero(evictable)) and self.free_one(Tier.HOST, incoming, Reason.ON_DEMAND, evictable)

    def evict(self, tier: Tier, keys: Keys) -> None:
        ledger = self._ledgers[tier]
        for key in keys.tolist():
            ledger.evict(key)
        ledger.prefetches.evict(keys)
        if tier is Tier.DEVICE:
            self._counters.evictions += len(keys)
        if len(keys) and "on_evicted" in self._policy.hooks:
            self._policy.on_evicted(tier, keys)

    def _victims(self, tier: Tier, slots: int, evictable: Mask, reason: Reason, incoming: Sequence[int]) -> Keys:
        ledger = self._ledgers[tier]
        size_class = ledger.size_class(incoming[0])
        return self._policy.victims(
            VictimRequest(
                tier=tier,
                bytes_needed=slots * ledger.bytes_of(incoming[0]),
                evictable=evictable,
                resident=ledger.in_class(ledger.resident, size_class),
                reason=reason,
                incoming=np.array(incoming, dtype=np.int64),
            )
        )
