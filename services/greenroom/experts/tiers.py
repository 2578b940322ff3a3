"""The tiers of one pool and the moves between them: disk below, the device above, the host between if there is one.

Joins the ledgers (who is where), the arenas (the memory) and the movers (the links); decides nothing: whom to fetch
and whom to evict is told by the engine, room is made before. With a host tier an expert on disk takes two hops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from greenroom.experts.hardware import Hardware
from greenroom.experts.layout import PackManifest
from greenroom.experts.ledger import Ledger, State
from greenroom.experts.mover import Job, Mover
from greenroom.experts.source import ExpertWeights
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import Reason, Tier, Transfer

READ_ATTEMPTS = 2


class Store(Protocol):
    """The lowest tier: a pack, or what a test puts in its place."""

    @property
    def manifest(self) -> PackManifest: ...

    def read_into(self, layer: int, expert: int, buffer: memoryview) -> int:
        """Fill the page-aligned ``buffer`` with one record; returns its bytes. Raises OSError, PackError."""
        ...


class Tiers:
    """``make_host_room()`` is asked for one host slot; it evicts someone and returns whether one is free."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        device: Ledger,
        host: Ledger | None,
        *,
        make_host_room: Callable[[int], bool],
        hardware: Hardware,
    ) -> None:
        layouts = [layer.layout for layer in store.manifest.layers]
        slot_bytes = max(layout.nbytes for layout in layouts)
        self._store = store
        self._catalogue = catalogue
        self._make_host_room = make_host_room
        self.slot_bytes = slot_bytes
        self.device = device
        self.host = host
        self._device_arena = hardware.arena(device.slots, slot_bytes, layouts)
        self._host_arena = None if host is None else hardware.arena(host.slots, slot_bytes, layouts)
        self._outbox = hardware.outbox()
        self._jobs: dict[int, Job] = {}  # by expert: queued or running, the hop that is next or under way
        self._without_host_slot: list[Job] = []  # bounded by the device's slots, each holds one
        self._disk = hardware.mover("disk", self._read, self._outbox)
        self._upload = None if host is None else hardware.mover("host-device", self._copy_up, self._outbox)

    @property
    def movers(self) -> tuple[Mover, ...]:
        return (self._disk,) if self._upload is None else (self._disk, self._upload)

    @property
    def moving(self) -> int:
        """Experts queued or on their way, to any tier."""
        return len(self._jobs)

    @property
    def waiting_ahead(self) -> int:
        """Queued moves that no layer waits for."""
        return sum(mover.waiting_ahead for mover in self.movers) + len(self._without_host_slot)

    def weights(self, keys: Sequence[int], layer: int) -> list[ExpertWeights]:
        """The tensors of resident experts of one layer, valid while they are pinned."""
        slots = self.device.slot_of[keys].tolist()
        return [self._device_arena.weights(slot, layer) for slot in slots]

    def fetch(self, key: int, reason: Reason, priority: float = 0.0) -> None:
        """Begin to bring an absent expert to the device, where a slot is free."""
        slot = self.device.reserve(key)
        host = self.host
        if host is None:
            self._queue(self._disk, Job(key, Tier.DISK, Tier.DEVICE, -1, slot, reason, priority))
        elif host.state[key] == State.RESIDENT:
            self._start_upload(Job(key, Tier.HOST, Tier.DEVICE, -1, slot, reason, priority))
        else:
            job = Job(key, Tier.DISK, Tier.HOST, -1, -1, reason, priority)
            if not self._read_to_host(job):
                self._jobs[key] = job
                self._without_host_slot.append(job)

    def hurry(self, key: int) -> None:
        """A layer now waits for an expert that is on its way ahead."""
        job = self._jobs[key]
        job.reason = Reason.ON_DEMAND
        for mover in self.movers:
            mover.promote(key)

    def withdraw_ahead(self) -> int | None:
        """Give up the least urgent move that no layer waits for and that has not begun; None: there is none."""
        for mover in self.movers:
            key = mover.least_urgent()
            if key is not None and self.withdraw(key):
                return key
        return None

    def withdraw(self, key: int) -> bool:
        """Give up one queued move that no layer waits for; its slots are free again. False: it is too late."""
        for mover in self.movers:
            job = mover.withdraw(key)
            if job is not None:
                del self._jobs[key]
                self._give_up(job)
                return True
        return False

    def queued_ahead(self, key: int) -> Job | None:
        """The job of an expert that is on its way without a layer waiting for it."""
        job = self._jobs.get(key)
        return None if job is None or job.reason is Reason.ON_DEMAND else job

    def reprioritise(self, key: int, priority: float) -> None:
        self._jobs[key].priority = priority
        for mover in self.movers:
            mover.reprioritise(key, priority)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a move has finished; False where the time ran out."""
        return self._outbox.wait(timeout_s)

    def collect(self) -> list[Transfer]:
        """Book what has finished, begin second hops; returns the moves that ended, failed ones with their error."""
        ended = []
        for job in self._outbox.collect():
            del self._jobs[job.expert]
            error = None if job.error is None else f"{type(job.error).__name__}: {job.error}"
            if job.error is not None:
                self._give_up(job)
            elif job.target is Tier.DEVICE:
                self.device.arrived(job.expert)
                self._unpin_host(job)
            else:
                assert self.host is not None
                self.host.arrived(job.expert)
                slot = int(self.device.slot_of[job.expert])
                self._start_upload(Job(job.expert, Tier.HOST, Tier.DEVICE, -1, slot, job.reason, job.priority))
            ended.append(Transfer(job.expert, job.source, job.target, job.reason, error))
        while self._without_host_slot:
            job = next((j for j in self._without_host_slot if j.reason is Reason.ON_DEMAND), self._without_host_slot[0])
            if not self._read_to_host(job):
                break
            self._without_host_slot.remove(job)
        return ended

    def audit(self) -> None:
        """Raises LedgerError where an invariant of a ledger does not hold."""
        self.device.audit()
        if self.host is not None:
            self.host.audit()

    def close(self) -> None:
        for mover in self.movers:
            mover.close()

    # -- hops ------------------------------------------------------------------------------------------------

    def _queue(self, mover: Mover, job: Job) -> None:
        self._jobs[job.expert] = job
        mover.put(job)

    def _start_upload(self, job: Job) -> None:
        assert self.host is not None
        assert self._upload is not None
        self.host.pin(np.array([job.expert]))
        job.source_slot = int(self.host.slot_of[job.expert])
        self._queue(self._upload, job)

    def _read_to_host(self, job: Job) -> bool:
        """False where the host has no room now."""
        assert self.host is not None
        if not self.host.free and not self._make_host_room(job.expert):
            return False
        job.target_slot = self.host.reserve(job.expert)
        self._queue(self._disk, job)
        return True

    def _unpin_host(self, job: Job) -> None:
        if job.source is Tier.HOST:
            assert self.host is not None
            self.host.unpin(np.array([job.expert]))

    def _give_up(self, job: Job) -> None:
        """The expert does not reach the device; whatever was reserved for it is free again."""
        self.device.abandon(job.expert)
        self._unpin_host(job)
        if job.target is Tier.HOST:
            assert self.host is not None
            self.host.abandon(job.expert)

    # -- on the movers' threads ------------------------------------------------------------------------------

    def _read(self, job: Job) -> int:
        arena = self._device_arena if job.target is Tier.DEVICE else self._host_arena
        assert arena is not None
        layer, index = int(self._catalogue.layer_of[job.expert]), int(self._catalogue.index_of[job.expert])
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                return self._store.read_into(layer, index, arena.buffer(job.target_slot))
            except OSError:
                if attempt == READ_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _copy_up(self, job: Job) -> int:
        assert self._host_arena is not None
        self._device_arena.record(job.target_slot).copy_(self._host_arena.record(job.source_slot))
        return self.slot_bytes
