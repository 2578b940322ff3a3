"""Fetching what no layer waits for yet: the policy's wants, handed to the movers a few at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.counters import Counters
from greenroom.experts.ledger import State
from greenroom.experts.room import Room
from greenroom.experts.tiers import Tiers
from greenroom.policies.events import Reason, Tier
from greenroom.policies.expert_policy import ExpertPolicy, Prefetch, Target


class AheadFetcher:
    """Keeps up to ``queue_ahead`` of what the policy wants on the device queued, the most urgent first.

    Few, so that what is not queued yet can still be reordered, and what is queued taken back. Wants for the host
    tier are not acted on yet.
    """

    def __init__(self, policy: ExpertPolicy, tiers: Tiers, room: Room, counters: Counters, queue_ahead: int) -> None:
        self._policy = policy
        self._tiers = tiers
        self._room = room
        self._counters = counters
        self._queue_ahead = queue_ahead
        self._reordered: Prefetch | None = None
        self._refused: tuple[Prefetch | None, Target | None] = (None, None)

    def pump(self, *, freed: bool = False) -> None:
        """Look at the wants and queue what there is place for. Cheap where there are none.

        What the policy has refused to make room for is dropped until it wants something else, or until others may
        leave than could then (``freed``).
        """
        wants = prefetch, target = self._policy.prefetch, self._policy.target
        if prefetch is None and target is None:
            return
        self.reorder()
        if wants == self._refused and not freed:
            return
        accepted = prefetch is None or prefetch.tier is not Tier.DEVICE or self._queue_prefetches(prefetch)
        if accepted and target is not None and target.tier is Tier.DEVICE:
            accepted = self._queue_targets(target)
        if not accepted:
            self._refused = wants

    def reorder(self) -> None:
        """What waits follows the newest priorities; what is wanted no more is taken back."""
        prefetch = self._policy.prefetch
        if prefetch is not None and prefetch.tier is Tier.DEVICE and prefetch is not self._reordered:
            self._reorder(prefetch.priority)
            self._reordered = prefetch

    def withdraw_all_but(self, slots: int) -> None:
        """Take queued ones back, the least urgent first, until ``slots`` are free or none is left."""
        device = self._tiers.device
        while device.free < slots and (key := self._tiers.withdraw_ahead()) is not None:
            self._taken_back(key)

    def _queue_prefetches(self, prefetch: Prefetch) -> bool:
        """False where the policy would rather keep what is there."""
        device = self._tiers.device
        absent = np.flatnonzero((prefetch.priority > 0) & (device.state == State.ABSENT))
        for key in absent[np.argsort(-prefetch.priority[absent], kind="stable")].tolist():
            if self._full():
                return True
            if not device.free:
                evictable = device.evictable()
                if not evictable.any() or not (prefetch.may_evict is None or prefetch.may_evict[key]):
                    continue
                if not self._room.ahead(key, Reason.PREFETCH, evictable):
                    return False
            self._queue(key, Reason.PREFETCH, float(prefetch.priority[key]))
        return True

    def _queue_targets(self, target: Target) -> bool:
        """False as above."""
        device = self._tiers.device
        if target.drop_others:
            self._room.evict(np.flatnonzero(device.evictable() & ~target.wanted))
        for key in np.flatnonzero(target.wanted & (device.state == State.ABSENT)).tolist():
            if self._full():
                return True
            if not device.free:
                outside = device.evictable() & ~target.wanted
                if not outside.any():
                    return True
                if not self._room.ahead(key, Reason.TARGET, outside):
                    return False
            self._queue(key, Reason.TARGET, 0.0)
        return True

    def _full(self) -> bool:
        return self._tiers.waiting_ahead >= self._queue_ahead

    def _queue(self, key: int, reason: Reason, priority: float) -> None:
        self._tiers.fetch(key, reason, priority)
        self._room.unused[key] = True
        self._counters.prefetches += 1

    def _reorder(self, priority: NDArray[np.float32]) -> None:
        for key in np.flatnonzero((self._tiers.device.state == State.LOADING) & self._room.unused).tolist():
            job = self._tiers.queued_ahead(key)
            if job is None or job.reason is not Reason.PREFETCH:
                continue
            if priority[key] > 0:
                self._tiers.reprioritise(key, float(priority[key]))
            elif self._tiers.withdraw(key):
                self._taken_back(key)

    def _taken_back(self, key: int) -> None:
        self._room.unused[key] = False
        self._counters.prefetches -= 1
