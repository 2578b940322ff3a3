"""The first fill of the tiers, behind everything else that moves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import NamedTuple

from greenroom.core.units import MIB, format_bytes
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.fill_queue import FillQueue
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Reason, Tier, Transfer

log = logging.getLogger(__name__)

_QUEUED = 64
"""At most so many are queued: few enough to look through."""

_QUEUED_BYTES = 64 * MIB
"""What a fast disk reads until an idle owner looks again. More would only lengthen what a first request meets."""

_LEAST_QUEUED = 4


class FillProgress(NamedTuple):
    """The first fill of the device. ``left``: experts still to come, at most; ``experts``, ``nbytes``: what it has
    brought; ``seconds``: since it began, or what it took; ``failed``: experts that could not be read."""

    left: int = 0
    experts: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failed: int = 0

    def describe(self, link_bytes: int) -> str:
        """``link_bytes``: what the disk's link has moved meanwhile, for requests too."""
        rate = link_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"{self.experts} experts, {format_bytes(self.nbytes)} in {self.seconds:.2f} s; "
            f"with what requests fetched the disk gave {rate:.2f} GB/s"
        )


class FirstFill:
    """The device first, then the host. Each expert is tried once.

    On the device only slots are taken that are free, and they are given back to whoever asks for them, unless the
    expert has begun to move. The host's may also be those of experts that the device holds too. Where its size class is
    full, an expert keeps its turn as long as others come: what has taken a slot from the fill may be taken back.
    """

    def __init__(self, tiers: Tiers, evictor: Evictor, hardware: Hardware) -> None:
        self._tiers = tiers
        self._evictor = evictor
        self._hardware = hardware
        self._most = max(_LEAST_QUEUED, min(_QUEUED, _QUEUED_BYTES // int(tiers.device.sizes.bytes_of.max())))
        self._device = FillQueue(tiers.device.sizes)
        self._host = FillQueue(tiers.device.sizes)
        self._began = 0.0
        self._moved_before = 0
        self._running = False
        self.progress = FillProgress()
        self.done = threading.Event()
        """Whether nothing of the device's fill is left. Any thread may wait for it while the owner goes on."""
        self.done.set()

    def begin_device(self, keys: Iterable[int]) -> None:
        self._device.extend(dict.fromkeys(keys))
        self._began, self._running = self._hardware.now(), True
        self._moved_before = self._tiers.movers[0].bytes_moved
        self.done.clear()
        self.progress = FillProgress()
        self._queue_device()
        self.progress = self.progress._replace(left=len(self.to_come()))

    def begin_host(self, keys: Iterable[int]) -> None:
        """Without those that are on the device by then. Nothing without a host tier."""
        if self._tiers.host is not None:
            self._host.extend(keys)
            self.queue()

    @property
    def unfinished(self) -> bool:
        """Whether something is to be queued or booked yet."""
        return self._running or bool(self._host) or self._tiers.moving_to_host > 0

    def to_come(self) -> list[int]:
        """What the device's fill still brings, as far as slots are free."""
        return [*self._tiers.filling, *self._device.within(self._tiers.device.free_places.tolist())]

    def queue(self) -> None:
        """Queue more, as the queue has room."""
        if self._running:
            self._queue_device()
        if self._host and not self._device:
            self._queue_host()

    def arrived(self, transfer: Transfer) -> None:
        """A move has ended, or has failed."""
        if transfer.reason is Reason.FILL and transfer.error is not None:
            self.progress = self.progress._replace(failed=self.progress.failed + 1)
            if self.progress.failed == 1:
                log.warning("the first fill goes on without an expert: %s", transfer.error)
        elif transfer.reason is Reason.FILL and transfer.target is Tier.DEVICE:
            _, experts, nbytes, _, failed = self.progress
            left = len(self._tiers.filling) + self._device.count_within(self._tiers.device.free_places.tolist())
            seconds = self._hardware.now() - self._began
            own = self._tiers.device.bytes_of(transfer.expert)
            self.progress = FillProgress(left, experts + 1, nbytes + own, seconds, failed)

    def settle(self) -> None:
        """All that has ended is told."""
        if self._running:
            self._end_if_over()

    def give_back(self, size_class: int) -> bool:
        """Free a slot of the class on the device that waits to be filled. False: there is none."""
        key = self._tiers.withdraw_fill(size_class)
        if key is None:
            return False
        self._device.put_back(key)
        return True

    def give_way(self, keys: Iterable[int]) -> None:
        """Take back those of ``keys`` that are queued: the policy wants them sooner."""
        for key in keys:
            if key in self._tiers.filling and self._tiers.withdraw(key):
                self._device.extend([key])

    def drop(self, unwanted: Mask) -> None:
        """Take back those of ``unwanted[experts]`` that are queued, and forget them."""
        for key in [key for key in self._tiers.filling if unwanted[key]]:
            self._tiers.withdraw(key)
        self._device.drop(unwanted)

    def _queue_device(self) -> None:
        ledger, tiers = self._tiers.device, self._tiers
        while len(tiers.filling) < self._most and ledger.free:
            key = self._device.take(ledger.open_classes)
            if key is None:
                break
            if ledger.absent[key] and not tiers.bound_for_host(key):
                tiers.fetch(key, Reason.FILL)
        self._end_if_over()

    def _queue_host(self) -> None:
        ledger, tiers, keys = self._tiers.ledger(Tier.HOST), self._tiers, self._host
        may_have_room = list(range(ledger.sizes.classes))
        while not (tiers.short_of_host_room or tiers.moving_to_host >= _QUEUED):
            key = keys.take(may_have_room)
            if key is None:
                if not (self._running or tiers.moving_to_host):
                    keys.clear()  # no slot will become free by what the fill brings or a policy takes back
                return
            if not (ledger.absent[key] and tiers.device.absent[key]):
                continue
            if ledger.free_in(ledger.size_class(key)) or self._displace_copy(key):
                tiers.fetch_to_host(key, Reason.FILL)
                ledger.prefetches.begin(key)
            else:
                may_have_room.remove(ledger.size_class(key))
                keys.put_back(key)

    def _displace_copy(self, incoming: int) -> bool:
        """Free a host slot for the expert of one that the device holds too. False: there is none, or it stays."""
        ledger = self._tiers.ledger(Tier.HOST)
        copies = ledger.evictable_in(ledger.size_class(incoming)) & self._tiers.device.resident
        return bool(copies.any()) and self._evictor.free_one(Tier.HOST, incoming, Reason.FILL, copies)

    def _end_if_over(self) -> None:
        device = self._tiers.device
        if self._tiers.filling or (device.free and self._device.count_within(device.free_places.tolist())):
            return
        self._device.clear()
        self._running = False
        self.progress = self.progress._replace(left=0, seconds=self._hardware.now() - self._began)
        self.done.set()
        text = f", {self.progress.failed} could not be read" if self.progress.failed else ""
        moved = self._tiers.movers[0].bytes_moved - self._moved_before
        log.info("the expert memory is filled: %s%s", self.progress.describe(moved), text)
