"""Fetching what no layer waits for yet: the policy's wants, handed to the movers a few at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

import numpy as np

from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import Ledger, State
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.deciding.evictor import Evictor
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch, Target

_FILL_QUEUED = 64
"""Enough for any link, and few enough to look through."""


class Prefetcher:
    """Keeps up to ``queue_ahead`` of what the policy wants on the device queued, the most urgent first, and up to as
    many on their way to the host that go no further.

    Few, so that what is not queued yet can still be reordered, and what is queued taken back. What is wanted on the
    host stands behind what is bound for the device, on the link and for the host's slots. Where there is no host tier
    wants for it are left alone. What the host begins with comes last: it is tried once, and takes the place of nobody
    but of copies that the device has too.
    """

    def __init__(
        self, policy: ExpertPolicy, tiers: Tiers, evictor: Evictor, counters: Counters, queue_ahead: int
    ) -> None:
        self._policy = policy
        self._tiers = tiers
        self._to_device = _ToDevice(tiers, evictor, counters, queue_ahead)
        self._to_host = None if tiers.host is None else _ToHost(tiers, tiers.host, evictor, counters, queue_ahead)
        self._seen: tuple[Prefetch | None, Target | None] = (None, None)
        self._fill: deque[int] = deque()

    def fill_host(self, keys: Iterable[int]) -> None:
        """Begin to fill the host with these, the first first, but for those that are on the device."""
        if self._to_host is not None:
            self._fill.extend(keys)
            self.fill()

    def fill(self) -> bool:
        """Queue more of the host's first fill, as there is place for it; False where none is left to queue."""
        if self._fill and self._to_host is not None:
            self._to_host.fill(self._fill)
        return bool(self._fill)

    def pump(self, *, freed: bool = False) -> None:
        """Look at the wants and queue what there is place for. Cheap where there are none.

        What the policy has refused to make room for is dropped until it wants something else, or until others may
        leave than could then (``freed``).
        """
        if self._fill:
            self.fill()
        if self._policy.prefetch is None and self._policy.target is None and self._seen == (None, None):
            return
        self.reorder()
        self._to_device.pump(*self._wants(Tier.DEVICE), freed=freed)
        if self._to_host is not None:
            self._to_host.pump(*self._wants(Tier.HOST), freed=freed)

    def reorder(self) -> None:
        """What waits follows the newest wants; what is wanted no more is taken back."""
        wants = self._policy.prefetch, self._policy.target
        if wants == self._seen:
            return
        self._seen = wants
        self._to_device.reorder(*self._wants(Tier.DEVICE))
        if self._to_host is not None:
            self._to_host.reorder(*self._wants(Tier.HOST))

    def withdraw_all_but(self, slots: int) -> None:
        """Take queued ones back, the least urgent first, until ``slots`` are free on the device or none is left."""
        device = self._tiers.device
        while device.free < slots and (key := self._tiers.withdraw_prefetch()) is not None:
            self._to_device.taken_back(key)

    def withdraw_from_host(self) -> bool:
        """Take back the least urgent of those queued that stay on the host; False where there is none."""
        if self._to_host is None or (key := self._tiers.withdraw_to_host()) is None:
            return False
        self._to_host.taken_back(key)
        return True

    def _wants(self, tier: Tier) -> tuple[Prefetch | None, Target | None]:
        prefetch, target = self._policy.prefetch, self._policy.target
        return (
            prefetch if prefetch is not None and prefetch.tier is tier else None,
            target if target is not None and target.tier is tier else None,
        )


class _Lane(ABC):
    """The wants for one tier."""

    def __init__(self, tiers: Tiers, ledger: Ledger, evictor: Evictor, counters: Counters, queue_ahead: int) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._evictor = evictor
        self._counters = counters
        self._queue_ahead = queue_ahead
        self._refused: tuple[Prefetch | None, Target | None] = (None, None)
        self._had: tuple[Prefetch | None, Target | None, int] = (None, None, 0)

    def pump(self, prefetch: Prefetch | None, target: Target | None, *, freed: bool) -> None:
        wants = prefetch, target
        if wants == (None, None) or (wants == self._refused and not freed):
            return
        standing = prefetch, target, self._departures()
        if standing == self._had:
            return
        if target is None or not target.drop_others:
            if self._full():
                return
            if not self._lacks_any(prefetch, target):
                self._had = standing
                return
        accepted = prefetch is None or self._prefetches(prefetch)
        if accepted and target is not None:
            accepted = self._targets(target)
        if not accepted:
            self._refused = wants

    def _lacks_any(self, prefetch: Prefetch | None, target: Target | None) -> bool:
        absent = self._absent()
        return (prefetch is not None and bool((prefetch.priority[absent] > 0).any())) or (
            target is not None and bool(target.wanted[absent].any())
        )

    def _departures(self) -> int:
        """As long as it stays, nobody has come to lack."""
        return self._ledger.departures + self._tiers.device.departures

    def reorder(self, prefetch: Prefetch | None, target: Target | None) -> None:
        for key in np.flatnonzero((self._ledger.state == State.LOADING) & self._unused()).tolist():
            job = self._tiers.queued_prefetch(key)
            if job is None or job.reason is Reason.FILL:
                continue
            if job.reason is Reason.TARGET:
                wanted = target is not None and bool(target.wanted[key])
            else:
                wanted = prefetch is not None and bool(prefetch.priority[key] > 0)
                if prefetch is not None and wanted:
                    self._tiers.reprioritise(key, float(prefetch.priority[key]))
            if not wanted and self._tiers.withdraw(key):
                self.taken_back(key)

    @abstractmethod
    def taken_back(self, key: int) -> None:
        """A queued one was withdrawn."""

    @abstractmethod
    def _unused(self) -> Mask:
        """``[experts]``: brought ahead by these wants, or coming, and no use yet."""

    @abstractmethod
    def _absent(self) -> Mask:
        """``[experts]``: could be fetched."""

    @abstractmethod
    def _full(self) -> bool:
        """Whether enough is queued."""

    @abstractmethod
    def _outside(self, target: Target) -> Mask:
        """``[experts]``: may leave for a member of the target."""

    @abstractmethod
    def _make_room(self, key: int, reason: Reason, evictable: Mask) -> bool:
        """False where the policy would rather keep what is there."""

    @abstractmethod
    def _evict_others(self, target: Target) -> None: ...

    @abstractmethod
    def _queue(self, key: int, reason: Reason, priority: float) -> None: ...

    def _prefetches(self, prefetch: Prefetch) -> bool:
        """False where the policy would rather keep what is there."""
        for key in self._in_order(prefetch).tolist():
            if self._full():
                return True
            if not self._ledger.free:
                evictable = self._ledger.evictable()
                if not evictable.any():
                    return True
                if not self._make_room(key, Reason.PREFETCH, evictable):
                    return False
            self._queue(key, Reason.PREFETCH, float(prefetch.priority[key]))
        return True

    def _in_order(self, prefetch: Prefetch) -> Keys:
        """Whom to fetch, the most urgent first; of those that may displace nobody as many as there are free slots."""
        free = self._ledger.free
        absent = self._absent()
        if not free and prefetch.may_evict is not None:
            absent &= prefetch.may_evict
        wanted = np.flatnonzero(absent & (prefetch.priority > 0))
        wanted = wanted[np.argsort(-prefetch.priority[wanted], kind="stable")]
        if not free or prefetch.may_evict is None:
            return wanted
        later = wanted[free:]
        return np.concatenate((wanted[:free], later[prefetch.may_evict[later]]))

    def _targets(self, target: Target) -> bool:
        """False as above."""
        if target.drop_others:
            self._evict_others(target)
        for key in np.flatnonzero(target.wanted & self._absent()).tolist():
            if self._full():
                return True
            if not self._ledger.free:
                outside = self._outside(target)
                if not outside.any():
                    return True
                if not self._make_room(key, Reason.TARGET, outside):
                    return False
            self._queue(key, Reason.TARGET, 0.0)
        return True


class _ToDevice(_Lane):
    def __init__(self, tiers: Tiers, evictor: Evictor, counters: Counters, queue_ahead: int) -> None:
        super().__init__(tiers, tiers.device, evictor, counters, queue_ahead)

    def taken_back(self, key: int) -> None:
        self._evictor.unused[key] = False
        self._counters.prefetches -= 1

    def _unused(self) -> Mask:
        return self._evictor.unused

    def _absent(self) -> Mask:
        absent: Mask = self._ledger.state == State.ABSENT
        return absent

    def _full(self) -> bool:
        return self._tiers.waiting_prefetches >= self._queue_ahead

    def _outside(self, target: Target) -> Mask:
        return self._ledger.evictable() & ~target.wanted

    def _make_room(self, key: int, reason: Reason, evictable: Mask) -> bool:
        return self._evictor.ahead(key, reason, evictable)

    def _evict_others(self, target: Target) -> None:
        self._evictor.evict(np.flatnonzero(self._outside(target)))

    def _queue(self, key: int, reason: Reason, priority: float) -> None:
        self._evictor.goes_to_device(key)
        self._tiers.fetch(key, reason, priority)
        self._evictor.unused[key] = True
        self._counters.prefetches += 1


class _ToHost(_Lane):
    """Who is on the device, or on the way there, is nearer than the host already and is not fetched."""

    def __init__(self, tiers: Tiers, host: Ledger, evictor: Evictor, counters: Counters, queue_ahead: int) -> None:
        super().__init__(tiers, host, evictor, counters, queue_ahead)

    def taken_back(self, key: int) -> None:
        self._evictor.unused_on_host[key] = False
        self._counters.host_prefetches -= 1

    def _unused(self) -> Mask:
        return self._evictor.unused_on_host

    def _absent(self) -> Mask:
        absent: Mask = (self._ledger.state == State.ABSENT) & (self._tiers.device.state == State.ABSENT)
        return absent

    def _full(self) -> bool:
        return self._tiers.short_of_host_room or self._tiers.moving_to_host >= self._queue_ahead

    def _outside(self, target: Target) -> Mask:
        """Nobody of the target, unless it is on the device as well: then its copy here is the one to do without."""
        evictable = self._ledger.evictable()
        outside = evictable & ~target.wanted
        return outside if outside.any() else evictable & self._tiers.device.resident

    def _make_room(self, key: int, reason: Reason, evictable: Mask) -> bool:
        return self._evictor.ahead_on_host(key, reason, evictable)

    def _evict_others(self, target: Target) -> None:
        self._evictor.evict_from_host(np.flatnonzero(self._ledger.evictable() & ~target.wanted))

    def fill(self, keys: deque[int]) -> None:
        """Take those off ``keys`` that are queued or on a tier already; all where there is no place any more."""
        absent = self._absent()
        while keys and not self._tiers.short_of_host_room and self._tiers.moving_to_host < _FILL_QUEUED:
            key = keys.popleft()
            if absent[key] and (self._ledger.free or self._displace_copy(key)):
                self._queue(key, Reason.FILL, 0.0)
            elif absent[key]:
                keys.clear()

    def _displace_copy(self, key: int) -> bool:
        copies = self._ledger.evictable() & self._tiers.device.resident
        return bool(copies.any()) and self._make_room(key, Reason.FILL, copies)

    def _queue(self, key: int, reason: Reason, priority: float) -> None:
        self._tiers.fetch_to_host(key, reason, priority)
        self._evictor.unused_on_host[key] = True
        self._counters.host_prefetches += 1
