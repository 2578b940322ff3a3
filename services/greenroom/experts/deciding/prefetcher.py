"""Fetches what no layer waits for yet: the policy's wants, handed to the movers a few at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from greenroom.experts.bookkeeping.ledger import LOADING
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.first_fill import FirstFill
from greenroom.policies.base.array_types import Keys, Mask, Scores
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch, Target

Wants = tuple[Prefetch | None, Target | None]


class Prefetcher:
    """Keeps up to ``queue_ahead`` of the experts that the policy wants queued for each tier, the most urgent first.

    Few are queued at a time, so that the others can still be reordered and the queued ones taken back. The host's wants
    come after the device's, on the link and for the host's slots. Wants for a host tier that does not exist are
    ignored. The ``first_fill`` comes last of all, and gives its slots back.
    """

    def __init__(
        self, policy: ExpertPolicy, tiers: Tiers, evictor: Evictor, first_fill: FirstFill, queue_ahead: int
    ) -> None:
        self._policy = policy
        self._tiers = tiers
        self._first_fill = first_fill
        self._device = _TierPrefetcher(Tier.DEVICE, tiers, evictor, first_fill, queue_ahead)
        self._host = None
        if tiers.host is not None:
            self._host = _TierPrefetcher(Tier.HOST, tiers, evictor, first_fill, queue_ahead)
        self._by_tier = [self._device] if self._host is None else [self._device, self._host]
        self._seen: Wants = (None, None)

    def pump(self, *, freed: bool = False) -> None:
        """Queue what the policy wants, as the queue has room, and the first fill. Cheap where there is nothing to do.

        An expert that the policy has refused to evict for is dropped until the policy wants something else, or until
        more experts have become evictable (``freed``).
        """
        if self._policy.prefetch is not None or self._policy.target is not None or self._seen != (None, None):
            self.reorder()
            for each in self._by_tier:
                each.pump(self._wants(each.tier), freed=freed)
        if self._first_fill.unfinished:
            self._first_fill.queue()

    def reorder(self) -> None:
        """Fit the queue to the newest wants: change priorities, and take back what is no longer wanted."""
        wants = self._policy.prefetch, self._policy.target
        if wants == self._seen:
            return
        self._seen = wants
        target = wants[1]
        if target is not None and target.drop_others and target.tier is Tier.DEVICE:
            self._first_fill.drop(~target.wanted)
        for each in self._by_tier:
            each.reorder(*self._wants(each.tier))

    def failed(self, key: int) -> None:
        """The expert could not be read. Until the target changes it is not read for the target again: each try would be
        another read of a whole record."""
        for each in self._by_tier:
            each.failed.add(key)

    def free_device_slots(self, size_class: int, slots: int) -> None:
        """Take back queued experts of the class, the least urgent first, until it has ``slots`` free on the device or
        none is left.
        """
        device = self._tiers.device
        while device.free_in(size_class) < slots and self._first_fill.give_back(size_class):
            pass
        while device.free_in(size_class) < slots and (key := self._tiers.withdraw_prefetch(size_class)) is not None:
            device.prefetches.take_back(key)

    def free_host_slot(self, incoming: int) -> bool:
        """Take back the least urgent of the queued experts that stay on the host, in a slot that ``incoming`` may have.
        False: there is none.
        """
        if self._host is None:
            return False
        if (key := self._tiers.withdraw_to_host(self._host.ledger.size_class(incoming))) is None:
            return False
        self._host.ledger.prefetches.take_back(key)
        return True

    def _wants(self, tier: Tier) -> Wants:
        prefetch, target = self._policy.prefetch, self._policy.target
        return (
            prefetch if prefetch is not None and prefetch.tier is tier else None,
            target if target is not None and target.tier is tier else None,
        )


class _TierPrefetcher:
    """The wants for one tier. An expert that is on the device, or on its way there, is not fetched to the host."""

    def __init__(self, tier: Tier, tiers: Tiers, evictor: Evictor, first_fill: FirstFill, queue_ahead: int) -> None:
        self.tier = tier
        self.ledger = tiers.ledger(tier)
        self._device = tiers.device
        self._tiers = tiers
        self._evictor = evictor
        self._first_fill = first_fill
        self._queue_ahead = queue_ahead
        self._classes = self.ledger.sizes.classes
        self.failed: set[int] = set()
        """Experts that could not be read since the target is what it is."""
        self._target: Target | None = None
        self._refused: Wants = (None, None)
        self._refused_classes: set[int] = set()
        """For whose experts the policy has refused to evict while it wanted the above."""
        self._satisfied: tuple[Wants, int] = (None, None), 0

    def pump(self, wants: Wants, *, freed: bool) -> None:
        if wants == (None, None):
            return
        if wants != self._refused:
            self._refused = wants
            self._refused_classes.clear()
        elif not freed and len(self._refused_classes) == self._classes:
            return
        prefetch, target = wants
        if target is not self._target:
            self._target = target
            self.failed.clear()
        if prefetch is not None and self.tier is Tier.DEVICE and self._tiers.filling:
            self._take_from_fill(prefetch)
        departures = self.ledger.departures + self._device.departures
        if (wants, departures) == self._satisfied:
            return
        if target is None or not target.drop_others:
            if self._full(self._queue_ahead):
                return
            if not self._lacks_any(prefetch, target):
                self._satisfied = wants, departures
                return
        refused = set() if freed else set(self._refused_classes)
        if prefetch is not None:
            evictable_in, priority = self.ledger.evictable_in, prefetch.priority
            self._fetch(self._in_order(prefetch), Reason.PREFETCH, evictable_in, priority, refused)
        if target is not None and len(refused) < self._classes:
            self._fetch_target(target, refused)
        self._refused_classes |= refused

    def reorder(self, prefetch: Prefetch | None, target: Target | None) -> None:
        unused = self.ledger.prefetches.unused
        for key in np.flatnonzero((self.ledger.state == LOADING) & unused).tolist():
            job = self._tiers.queued_prefetch(key)
            if job is None or job.reason is Reason.FILL:
                continue
            if job.reason is Reason.TARGET:
                wanted = target is not None and bool(target.wanted[key])
            else:
                wanted = prefetch is not None and bool(prefetch.wanted[key])
                if prefetch is not None and wanted:
                    self._tiers.reprioritise(key, float(prefetch.priority[key]))
            if not wanted and self._tiers.withdraw(key):
                self.ledger.prefetches.take_back(key)

    def _take_from_fill(self, prefetch: Prefetch) -> None:
        """Take back of the first fill what can be queued now as a prefetch, and as many slots."""
        room = self._queue_ahead - self._tiers.waiting_prefetches
        if room <= 0:
            return
        can_come = self._absent().copy()
        can_come[list(self._tiers.filling)] = True
        wanted = np.flatnonzero(can_come & prefetch.wanted)
        soonest = wanted[np.argsort(-prefetch.priority[wanted], kind="stable")][:room]
        self._first_fill.give_way(soonest.tolist())
        for size_class, count in Counter(map(self.ledger.size_class, soonest.tolist())).items():
            while self.ledger.free_in(size_class) < count and self._first_fill.give_back(size_class):
                pass

    def _lacks_any(self, prefetch: Prefetch | None, target: Target | None) -> bool:
        return (prefetch is not None and bool(np.count_nonzero(prefetch.wanted & self._absent()))) or (
            target is not None and bool(np.count_nonzero(self._missing(target)))
        )

    def _missing(self, target: Target) -> Mask:
        missing = np.asarray(target.wanted & self._absent())
        if self.failed:
            missing[list(self.failed)] = False
        return missing

    def _fetch_target(self, target: Target, refused: set[int]) -> None:
        """As ``_fetch``."""
        if target.drop_others:
            self._evictor.evict(self.tier, np.flatnonzero(self.ledger.evictable() & ~target.wanted))
        keys = np.flatnonzero(self._missing(target))
        self._fetch(keys, Reason.TARGET, lambda size_class: self._evictable_for(target, size_class), None, refused)

    def _fetch(
        self,
        keys: Keys,
        reason: Reason,
        evictable_in: Callable[[int], Mask],
        priority: Scores | None,
        refused: set[int],
    ) -> None:
        """Queue these, as the queue has room and slots are free or can be freed. ``refused``: size classes for whose
        experts the policy refuses to evict; others that it refuses are added.
        """
        ledger = self.ledger
        full = set(refused)
        for key in keys.tolist():
            if self._full(self._queue_ahead) or len(full) == self._classes:
                return
            size_class = ledger.size_class(key)
            if size_class in full:
                continue
            if not ledger.free_in(size_class) and not (
                self.tier is Tier.DEVICE and self._first_fill.give_back(size_class)
            ):
                evictable = evictable_in(size_class)
                if not np.count_nonzero(evictable):
                    full.add(size_class)
                    continue
                if not self._evictor.free_one(self.tier, key, reason, evictable):
                    full.add(size_class)
                    refused.add(size_class)
                    continue
            self._queue(key, reason, 0.0 if priority is None else float(priority[key]))

    def _in_order(self, prefetch: Prefetch) -> Keys:
        """The experts to fetch, the most urgent first. Those that may not evict come only as far as slots are free."""
        ledger, may_evict = self.ledger, prefetch.may_evict
        absent = self._absent()
        if not ledger.free and may_evict is not None:
            absent = absent & may_evict
        wanted = np.flatnonzero(absent & prefetch.wanted)
        wanted = wanted[np.argsort(-prefetch.priority[wanted], kind="stable")]
        if not ledger.free or may_evict is None:
            return wanted
        come = may_evict.copy()
        come[ledger.sizes.placed(wanted, ledger.free_places)] = True
        return wanted[come[wanted]]

    def _absent(self) -> Mask:
        """``[experts]``: can be fetched. Not to be written to."""
        return self.ledger.absent if self.tier is Tier.DEVICE else self.ledger.absent & self._device.absent

    def _evictable_for(self, target: Target, size_class: int) -> Mask:
        """``[experts]``: of the class, may be evicted for a member of the target. A member itself may be only where the
        device holds it too, and only from the host.
        """
        evictable = self.ledger.evictable_in(size_class)
        others = evictable & ~target.wanted
        return others if self.tier is Tier.DEVICE or np.count_nonzero(others) else evictable & self._device.resident

    def _full(self, limit: int) -> bool:
        """Whether the queue has no room: ``limit`` experts wait for the device, or are on their way to the host."""
        tiers = self._tiers
        if self.tier is Tier.DEVICE:
            return tiers.waiting_prefetches >= limit
        return tiers.short_of_host_room or tiers.moving_to_host >= limit

    def _queue(self, key: int, reason: Reason, priority: float) -> None:
        if self.tier is Tier.DEVICE:
            self._tiers.fetch(key, reason, priority)
        else:
            self._tiers.fetch_to_host(key, reason, priority)
        self.ledger.prefetches.begin(key)
