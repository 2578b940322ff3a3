"""The tiers of one pool and the moves between them: disk below, the device above, the host between if there is one.

Joins the ledgers (who is where), the arenas (the memory) and the movers (the links); decides nothing: whom to fetch
and whom to evict is told by the engine, room is made before. With a host tier an expert on disk takes two hops to the
device; one that is only wanted on the host takes the first of them, and has no slot on the device. An expert is never
on two ways at once: who is fetched to the device while bound for the host goes on from there.

Resident is only whose bytes have arrived. One that has *landed* may be computed with ahead of that, since the device
keeps the order; it stays on its way until its copy has ended. Where that fails, what was computed with it is void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.ledger import NO_SLOT, Ledger, LedgerError, State
from greenroom.experts.copying.arena import Arena, DeviceArena, Slots
from greenroom.experts.copying.carriers import Copies, DiskReads, StagedReads, Store, Uploads
from greenroom.experts.copying.device_errors import raise_if_fatal
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.copying.mover import Carrier, Job, Landing, Mover
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.policies.base.catalogue import Catalogue
from greenroom.policies.base.events import Reason, Tier, Transfer


class Tiers:
    """``make_host_room(incoming)`` is asked for one host slot for what is bound for the device; it evicts someone, or
    takes back what is not, and returns whether one is free.
    """

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
        self.slot_bytes = slot_bytes
        self.tensors_by_layer = [len(layout.tensors) for layout in layouts]
        self.device = device
        self.host = host
        self._make_host_room = make_host_room
        self._outbox = hardware.outbox()
        self._jobs: dict[int, Job] = {}  # by expert: queued or running, the hop that is next or under way
        self._to_host: set[int] = set()  # those of them that go no further than the host
        self._landed: set[int] = set()  # those of them whose copy to the device is queued there
        self.void: dict[int, str] = {}
        """By expert, why its bytes did not come after it had landed. Emptied by whoever discards what was computed."""
        self._without_host_slot: list[Job] = []  # bounded by the device's slots, each holds one
        accelerator = hardware.accelerator
        self._streamed = None if accelerator is None else DeviceArena(accelerator, device.slots, slot_bytes, layouts)
        self._ram: list[Arena] = []  # of the device tier, of the host tier, or staging

        def ram(slots: int) -> Arena:
            self._ram.append(hardware.arena(slots, slot_bytes, layouts))
            return self._ram[-1]

        disk: Carrier
        upload: Carrier | None = None
        self._device_arena: Arena | DeviceArena
        self._host_arena: Arena | None = None
        if self._streamed is None:
            self._device_arena = mapped = ram(device.slots)
            arenas = {Tier.DEVICE: mapped}
            if host is not None:
                arenas[Tier.HOST] = self._host_arena = ram(host.slots)
                upload = Copies(self._host_arena, mapped)
            disk = DiskReads(store, catalogue, arenas, hardware.reads)
        else:
            self._device_arena = self._streamed
            if host is None:
                ring = ram(StagedReads.ring_slots(hardware.reads))
                disk = StagedReads(store, catalogue, ring, self._streamed, hardware.reads, self._outbox)
            else:
                self._host_arena = pinned = ram(host.slots)
                disk = DiskReads(store, catalogue, {Tier.HOST: pinned}, hardware.reads)
                upload = Uploads(pinned, self._streamed, self._outbox)
        self._disk = hardware.mover("disk", disk, self._outbox)
        self._upload = None if upload is None else hardware.mover("host-device", upload, self._outbox)

    @property
    def movers(self) -> tuple[Mover, ...]:
        return (self._disk,) if self._upload is None else (self._disk, self._upload)

    @property
    def moving(self) -> int:
        """Experts queued or on their way to the device."""
        return len(self._jobs) - len(self._to_host)

    @property
    def moving_to_host(self) -> int:
        """Experts queued or on their way to the host and no further."""
        return len(self._to_host)

    @property
    def waiting_prefetches(self) -> int:
        """Queued moves to the device that no layer waits for."""
        return sum(mover.waiting_prefetches for mover in self.movers) + len(self._without_host_slot)

    @property
    def short_of_host_room(self) -> bool:
        """Whether a move to the device waits for a slot on the host."""
        return bool(self._without_host_slot)

    @property
    def in_ram(self) -> bool:
        """Whether the device computes in order with this thread: what is resident can be used without a wait."""
        return self._streamed is None

    @property
    def landed(self) -> bool:
        """Whether anyone has landed and not arrived yet."""
        return bool(self._landed)

    def computable(self, keys: Sequence[int]) -> list[bool]:
        """Of each expert whether it is resident, or has landed."""
        resident: list[bool] = self.device.resident[keys].tolist()
        if not self._landed:
            return resident
        return [here or key in self._landed for key, here in zip(keys, resident, strict=True)]

    def weights(self, keys: Sequence[int], layer: int) -> Iterable[ExpertWeights]:
        """The tensors of computable experts of one layer, valid while pinned; take each when it is computed."""
        arena = self._device_arena
        return (arena.weights(slot, layer) for slot in self.device.slot_of[keys].tolist())

    def release(self, keys: NDArray[np.int64]) -> None:
        """Undo one pin each. Their slots are filled anew only after the work on them that the device has queued."""
        if self._streamed is not None:
            slots = self.device.slot_of[keys]
            self._streamed.released(slots[slots != NO_SLOT].tolist())
        self.device.unpin(keys)

    def all_read(self) -> None:
        """Experts may have been computed with that nobody has pinned: their slots, too, are filled anew after that."""
        if self._streamed is not None:
            self._streamed.all_released()

    def fetch(self, key: int, reason: Reason, priority: float = 0.0) -> None:
        """Begin to bring an absent expert to the device, where a slot is free; on its way to the host it goes on."""
        slot = self.device.reserve(key)
        host = self.host
        if host is None:
            self._queue(self._disk, Job(key, Tier.DISK, Tier.DEVICE, -1, slot, reason, priority))
        elif key in self._to_host:
            self._to_host.remove(key)
            job = self._jobs[key]
            queued = self._disk.withdraw(key) is not None
            job.bound, job.reason, job.priority = Tier.DEVICE, reason, priority
            if queued:
                self._disk.put(job)
        elif host.state[key] == State.RESIDENT:
            self._start_upload(Job(key, Tier.HOST, Tier.DEVICE, -1, slot, reason, priority))
        else:
            job = Job(key, Tier.DISK, Tier.HOST, -1, -1, reason, priority)
            self._jobs[key] = job
            self._without_host_slot.append(job)
            self._begin_waiting()

    def fetch_to_host(self, key: int, reason: Reason, priority: float = 0.0) -> None:
        """Begin to bring an expert that is on neither tier to the host and no further, where a slot is free there."""
        assert self.host is not None
        slot = self.host.reserve(key)
        self._to_host.add(key)
        self._queue(self._disk, Job(key, Tier.DISK, Tier.HOST, -1, slot, reason, priority, bound=Tier.HOST))

    def hurry(self, key: int) -> None:
        """A layer now waits for an expert that is on its way ahead."""
        job = self._jobs[key]
        job.reason = Reason.ON_DEMAND
        for mover in self.movers:
            mover.promote(key)

    def withdraw_prefetch(self) -> int | None:
        """Give up the least urgent move to the device that no layer waits for and that has not begun; None: there is
        none. Those that have not even a slot on the host come first.
        """
        ahead = [job for job in self._without_host_slot if job.reason is not Reason.ON_DEMAND]
        if ahead and self.withdraw(key := min(ahead, key=lambda job: job.priority).expert):
            return key
        for mover in self.movers:
            least = mover.least_urgent()
            if least is not None and self.withdraw(least):
                return least
        return None

    def withdraw_to_host(self) -> int | None:
        """Give up the least urgent move that was to stay on the host and has not begun; None: there is none."""
        for key in sorted(self._to_host, key=lambda key: self._jobs[key].priority):
            if self.withdraw(key):
                return key
        return None

    def withdraw(self, key: int) -> bool:
        """Give up one queued move that no layer waits for; its slots are free again. False: it is too late."""
        job = self._jobs.get(key)
        if job is None or job.reason is Reason.ON_DEMAND:
            return False
        place = next((n for n, waiting in enumerate(self._without_host_slot) if waiting is job), None)
        if place is not None:
            del self._without_host_slot[place]
        elif not any(mover.withdraw(key) for mover in self.movers):
            return False
        self._drop(key)
        self._give_up(job)
        return True

    def queued_prefetch(self, key: int) -> Job | None:
        """The job of an expert that is on its way, to the device or the host, without a layer waiting for it."""
        job = self._jobs.get(key)
        return None if job is None or job.reason is Reason.ON_DEMAND else job

    def reprioritise(self, key: int, priority: float) -> None:
        self._jobs[key].priority = priority
        for mover in self.movers:
            mover.reprioritise(key, priority)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a move has finished; False where the time ran out."""
        self._begin_waiting()  # a move that was withdrawn may have left room on the host, and tells nobody
        return self._outbox.wait(timeout_s)

    def collect(self) -> list[Transfer]:
        """Book what has landed or ended, begin second hops; returns the moves that ended, failed ones with their error.

        Raises ModelBroken where a mover has died, or a move failed of a device that is lost.
        """
        ended = []
        for message in self._outbox.collect():
            if isinstance(message, Landing):
                self._landed.add(message.job.expert)
                continue
            job, text = message, None
            if job.error is not None:
                raise_if_fatal(job.error)
                text = f"{type(job.error).__name__}: {job.error}"
                if job.expert in self._landed:
                    self.void[job.expert] = text
            self._drop(job.expert)
            self._book(job)
            ended.append(Transfer(job.expert, job.source, job.target, job.reason, text))
        self._begin_waiting()
        return ended

    def audit(self) -> None:
        """Raises LedgerError where an invariant of a ledger does not hold, a slot is held for what does not come, or a
        resident expert's slot does not hold its bytes.
        """
        self.device.audit()
        self._audit_contents(self.device, self._device_arena)
        jobs = self._jobs.values()
        self._audit_loading(self.device, {job.expert for job in jobs if job.bound is Tier.DEVICE})
        if self._to_host != {job.expert for job in jobs if job.bound is Tier.HOST}:
            raise LedgerError("what is bound for the host is booked wrongly")
        if not self._landed <= self._jobs.keys():
            raise LedgerError("who has landed is not on its way")
        if self.host is not None:
            self.host.audit()
            if self._host_arena is not None:
                self._audit_contents(self.host, self._host_arena)
            self._audit_loading(
                self.host, {job.expert for job in jobs if job.target is Tier.HOST and job.target_slot != NO_SLOT}
            )

    def close(self) -> None:
        for mover in self.movers:
            mover.close()
        for arena in self._ram:
            arena.close()

    @staticmethod
    def _audit_loading(ledger: Ledger, moving: set[int]) -> None:
        if set(np.flatnonzero(ledger.state == State.LOADING).tolist()) != moving:
            raise LedgerError("slots are held for experts that are not on their way, or the other way round")

    @staticmethod
    def _audit_contents(ledger: Ledger, arena: Slots) -> None:
        resident = np.flatnonzero(ledger.resident)
        wrong = resident[arena.contents[ledger.slot_of[resident]] != resident]
        if len(wrong):
            raise LedgerError(f"experts {wrong.tolist()} are booked as resident, and other bytes lie in their slots")

    # -- hops ------------------------------------------------------------------------------------------------

    def _queue(self, mover: Mover, job: Job) -> None:
        self._jobs[job.expert] = job
        mover.put(job)

    def _drop(self, key: int) -> None:
        """Its job has ended or is given up."""
        del self._jobs[key]
        self._to_host.discard(key)
        self._landed.discard(key)

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

    def _book(self, job: Job) -> None:
        """A hop's outcome."""
        if job.error is not None:
            self._give_up(job)
        elif job.target is Tier.DEVICE:
            self.device.arrived(job.expert)
            self._unpin_host(job)
        else:
            assert self.host is not None
            self.host.arrived(job.expert)
            if job.bound is Tier.HOST:
                return
            slot = int(self.device.slot_of[job.expert])
            self._start_upload(Job(job.expert, Tier.HOST, Tier.DEVICE, -1, slot, job.reason, job.priority))

    def _begin_waiting(self) -> None:
        """Begin what waits for room on the host, as far as there is some now."""
        waiting = self._without_host_slot
        while waiting:
            job = next((job for job in waiting if job.reason is Reason.ON_DEMAND), waiting[0])
            if not self._read_to_host(job):
                break
            waiting.remove(job)

    def _unpin_host(self, job: Job) -> None:
        if job.source is Tier.HOST:
            assert self.host is not None
            self.host.unpin(np.array([job.expert]))

    def _give_up(self, job: Job) -> None:
        """The expert does not get where it was bound for; whatever was reserved for it is free again."""
        if job.bound is Tier.DEVICE:
            self.device.abandon(job.expert)
        self._unpin_host(job)
        if job.target is Tier.HOST and job.target_slot != NO_SLOT:
            assert self.host is not None
            self.host.abandon(job.expert)
