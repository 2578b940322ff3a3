"""The tiers of one pool and the moves between them: disk, perhaps a host tier, and the device.

``Tiers`` joins the ledgers, the arenas (memory) and the movers (links). It decides nothing: the engine says what to
fetch, and evicts before. With a host tier an expert on disk takes two hops to the device. An expert that is only wanted
on the host takes the first hop, and has no slot on the device. An expert never has two jobs: if it is fetched to the
device while bound for the host, the same job goes on.

An expert is resident once its bytes have arrived. An expert that has *landed* can be computed with before that, because
the device keeps the order of work; it is loading until its copy has ended. If the copy fails, what was computed with
the expert is void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.ledger import LOADING, NO_SLOT, RESIDENT, Ledger, LedgerError
from greenroom.experts.copying.arena import Arena, DeviceArena, Slots
from greenroom.experts.copying.device_errors import raise_if_fatal
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.copying.mover import Carrier, Job, Landing, Mover
from greenroom.experts.copying.transfers import Copies, DiskReads, StagedReads, Store, Uploads
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.policies.base.events import Reason, Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.streaming import stream_slots


class Tiers:
    """``make_host_room(incoming)`` frees one host slot for an expert bound for the device, by an eviction or by taking
    back a job that stays on the host. It returns whether it could.
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
        if (np.array([layout.nbytes for layout in layouts])[catalogue.layer_of] != catalogue.bytes_of).any():
            raise LedgerError("the catalogue is not that of the store's records")
        self.tensors_by_layer = [len(layout.tensors) for layout in layouts]
        self.device = device
        self.host = host
        self._make_host_room = make_host_room
        self._outbox = hardware.outbox()
        self._jobs: dict[int, Job] = {}  # by expert: the hop that is queued or under way
        self._to_host: set[int] = set()  # those of _jobs that go no further than the host
        self.filling: dict[int, None] = {}
        """Experts on their way to the device by the first fill, in order, for which nobody has asked yet."""
        self._landed: set[int] = set()  # those of _jobs whose copy the device has queued
        self.lost_copies: dict[int, str] = {}
        """By expert that had landed, why its bytes did not arrive. Cleared once what was computed is discarded."""
        self._without_host_slot: list[Job] = []  # bounded by the device's slots, each holds one
        accelerator = hardware.accelerator
        self.in_ram = accelerator is None
        """Whether the device tier is RAM: resident experts can be used without a wait."""
        self._streamed = None if accelerator is None else DeviceArena(accelerator, device.slot_bytes, layouts)
        self._ram: list[Arena] = []  # of the device tier, of the host tier, or staging

        def ram(slot_bytes: Sequence[int]) -> Arena:
            self._ram.append(hardware.arena(slot_bytes, layouts))
            return self._ram[-1]

        disk: Carrier
        upload: Carrier | None = None
        self._device_arena: Arena | DeviceArena
        self._host_arena: Arena | None = None
        if self._streamed is None:
            self._device_arena = mapped = ram(device.slot_bytes)
            arenas = {Tier.DEVICE: mapped}
            if host is not None:
                arenas[Tier.HOST] = self._host_arena = ram(host.slot_bytes)
                upload = Copies(self._host_arena, mapped)
            disk = DiskReads(store, catalogue, arenas, hardware.reads)
        else:
            self._device_arena = self._streamed
            if host is None:
                ring = ram([max(layout.nbytes for layout in layouts)] * StagedReads.ring_slots(hardware.reads))
                disk = StagedReads(store, catalogue, ring, self._streamed, hardware.reads, self._outbox)
            else:
                self._host_arena = pinned = ram(host.slot_bytes)
                disk = DiskReads(store, catalogue, {Tier.HOST: pinned}, hardware.reads)
                upload = Uploads(pinned, self._streamed, self._outbox)
        self._disk = hardware.mover("disk", disk, self._outbox)
        self._upload = None if upload is None else hardware.mover("host-device", upload, self._outbox)

    def ledger(self, tier: Tier) -> Ledger:
        ledger = self.device if tier is Tier.DEVICE else self.host
        assert ledger is not None
        return ledger

    @property
    def movers(self) -> tuple[Mover, ...]:
        return (self._disk,) if self._upload is None else (self._disk, self._upload)

    @property
    def stream_slots(self) -> list[int]:
        """By size class: through so many a layer passes its missing experts, where the policy streams."""
        moving = sum(mover.depth for mover in self.movers)
        return [stream_slots(moving, places) for places in self.device.places.tolist()]

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
        """Queued moves to the device that no layer waits for, without the first fill."""
        without_slot = sum(job.reason is not Reason.FILL for job in self._without_host_slot)
        return sum(mover.waiting_prefetches for mover in self.movers) + without_slot

    def bound_for_host(self, key: int) -> bool:
        """Whether the expert is on its way to the host and no further."""
        return key in self._to_host

    @property
    def short_of_host_room(self) -> bool:
        """Whether a move to the device waits for a slot on the host."""
        return bool(self._without_host_slot)

    @property
    def landed(self) -> bool:
        """Whether an expert has landed and not arrived yet."""
        return bool(self._landed)

    def computable(self, keys: Sequence[int]) -> list[bool]:
        """For each expert whether it is resident or has landed."""
        resident: list[bool] = self.device.resident[keys].tolist()
        if not self._landed:
            return resident
        return [here or key in self._landed for key, here in zip(keys, resident, strict=True)]

    def weights(self, keys: Sequence[int], layer: int) -> Iterable[ExpertWeights]:
        """The tensors of computable experts of one layer, valid while pinned. Take each just before it is computed."""
        arena = self._device_arena
        return (arena.weights(slot, layer) for slot in self.device.slot_of[keys].tolist())

    def release(self, keys: NDArray[np.int64]) -> None:
        """Undo one pin of each. The slots are filled again only after the work on them that the device has queued."""
        if self._streamed is not None:
            slots = self.device.slot_of[keys]
            self._streamed.released(slots[slots != NO_SLOT].tolist())
        self.device.unpin(keys)

    def all_read(self) -> None:
        """As ``release``, for experts that were used without a pin: no slot is filled before the work queued so far."""
        if self._streamed is not None:
            self._streamed.all_released()

    def fetch(self, key: int, reason: Reason, priority: float = 0.0) -> None:
        """Begin to bring an absent expert to the device, which must have a free slot for it. A job to the host is
        extended."""
        slot = self.device.reserve(key)
        host = self.host
        if host is None:
            self._queue(self._disk, Job(key, Tier.DISK, Tier.DEVICE, -1, slot, reason, priority))
            return
        host.prefetches.use(key)
        if key in self._to_host:
            self._to_host.remove(key)
            job = self._jobs[key]
            queued = self._disk.withdraw(key) is not None
            job.bound, job.reason, job.priority = Tier.DEVICE, reason, priority
            if queued:
                self._disk.put(job)
        elif host.state[key] == RESIDENT:
            self._start_upload(Job(key, Tier.HOST, Tier.DEVICE, -1, slot, reason, priority))
        else:
            job = Job(key, Tier.DISK, Tier.HOST, -1, -1, reason, priority)
            self._enter(job)
            self._without_host_slot.append(job)
            self._begin_waiting()

    def fetch_to_host(self, key: int, reason: Reason, priority: float = 0.0) -> None:
        """Begin to bring an expert that is on neither tier to the host, which must have a free slot for it, and no
        further.
        """
        assert self.host is not None
        slot = self.host.reserve(key)
        self._to_host.add(key)
        self._queue(self._disk, Job(key, Tier.DISK, Tier.HOST, -1, slot, reason, priority, bound=Tier.HOST))

    def hurry(self, key: int) -> None:
        """A layer now waits for this expert, which is being prefetched."""
        job = self._jobs[key]
        job.reason = Reason.ON_DEMAND
        self.filling.pop(key, None)
        for mover in self.movers:
            mover.promote(key)

    def withdraw_fill(self, size_class: int) -> int | None:
        """Withdraw the class's last of the first fill to the device. None: all of it that was queued has begun."""
        of_class = (key for key in reversed(self.filling) if self.device.size_class(key) == size_class)
        return next((key for key in of_class if self.withdraw(key)), None)

    def withdraw_prefetch(self, size_class: int) -> int | None:
        """Withdraw the class's least urgent prefetch to the device, those without a host slot first. None: all have
        begun.
        """

        def among(key: int) -> bool:
            return self.device.size_class(key) == size_class

        prefetches = [
            job
            for job in self._without_host_slot
            if job.reason not in (Reason.ON_DEMAND, Reason.FILL) and among(job.expert)
        ]
        if prefetches and self.withdraw(key := min(prefetches, key=lambda job: job.priority).expert):
            return key
        for mover in self.movers:
            least = mover.least_urgent(among)
            if least is not None and self.withdraw(least):
                return least
        return None

    def withdraw_to_host(self, size_class: int) -> int | None:
        """Withdraw the class's least urgent move that stays on the host. None: all have begun."""
        for key in sorted(self._to_host, key=lambda key: self._jobs[key].priority):
            if self.device.size_class(key) == size_class and self.withdraw(key):
                return key
        return None

    def withdraw(self, key: int) -> bool:
        """Withdraw a queued move that no layer waits for, and free its slots. False: it has begun or a layer waits."""
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
        """The job of an expert that comes before a layer waits for it, to the device or the host. None: it does not."""
        job = self._jobs.get(key)
        return None if job is None or job.reason is Reason.ON_DEMAND else job

    def reprioritise(self, key: int, priority: float) -> None:
        self._jobs[key].priority = priority
        for mover in self.movers:
            mover.reprioritise(key, priority)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a move has ended or an expert has landed. False: the time ran out."""
        self._begin_waiting()  # a withdrawn move may have freed a host slot
        return self._outbox.wait(timeout_s)

    def collect(self) -> list[Transfer]:
        """Book what has landed or ended, and begin second hops. Returns the moves that ended, or failed with an error.

        Raises ModelBroken if a mover has died, or if a move failed because the device is lost.
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
                    self.lost_copies[job.expert] = text
            self._drop(job.expert)
            self._book(job)
            ended.append(Transfer(job.expert, job.source, job.target, job.reason, text))
        self._begin_waiting()
        return ended

    def take_pages(self, slots: int) -> None:
        """Begin to take the memory of the first ``slots`` of the device tier, where that is RAM."""
        if isinstance(self._device_arena, Arena):
            self._device_arena.take_pages(min(slots, self._device_arena.slots))

    def audit(self) -> None:
        """Raises LedgerError if an invariant of a ledger does not hold, if a slot is reserved for an expert that is not
        on its way, or if a resident expert's slot does not hold its bytes.
        """
        self.device.audit()
        self._audit_contents(self.device, self._device_arena)
        jobs = self._jobs.values()
        self._audit_loading(self.device, {job.expert for job in jobs if job.bound is Tier.DEVICE})
        fill = {job.expert for job in jobs if job.bound is Tier.DEVICE and job.reason is Reason.FILL}
        if self.filling.keys() != fill:
            raise LedgerError("the experts of the first fill are booked wrongly")
        if self._to_host != {job.expert for job in jobs if job.bound is Tier.HOST}:
            raise LedgerError("the experts bound for the host are booked wrongly")
        if not self._landed <= self._jobs.keys():
            raise LedgerError("an expert that has landed is not on its way")
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
        if set(np.flatnonzero(ledger.state == LOADING).tolist()) != moving:
            raise LedgerError("the loading experts and those on their way disagree")

    @staticmethod
    def _audit_contents(ledger: Ledger, arena: Slots) -> None:
        resident = np.flatnonzero(ledger.resident)
        wrong = resident[arena.contents[ledger.slot_of[resident]] != resident]
        if len(wrong):
            raise LedgerError(f"experts {wrong.tolist()} are booked as resident, and other bytes lie in their slots")

    # -- hops ------------------------------------------------------------------------------------------------

    def _queue(self, mover: Mover, job: Job) -> None:
        self._enter(job)
        mover.put(job)

    def _enter(self, job: Job) -> None:
        self._jobs[job.expert] = job
        if job.reason is Reason.FILL and job.bound is Tier.DEVICE:
            self.filling.setdefault(job.expert)

    def _drop(self, key: int) -> None:
        """Its job has ended or was withdrawn."""
        del self._jobs[key]
        self._to_host.discard(key)
        self.filling.pop(key, None)
        self._landed.discard(key)

    def _start_upload(self, job: Job) -> None:
        assert self.host is not None
        assert self._upload is not None
        self.host.pin(np.array([job.expert]))
        job.source_slot = int(self.host.slot_of[job.expert])
        self._queue(self._upload, job)

    def _read_to_host(self, job: Job) -> bool:
        """False: the host has no free slot for it now."""
        assert self.host is not None
        if not self.host.free_in(self.host.size_class(job.expert)) and not self._make_host_room(job.expert):
            return False
        job.target_slot = self.host.reserve(job.expert)
        self._queue(self._disk, job)
        return True

    def _book(self, job: Job) -> None:
        """A hop has ended."""
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
        """Begin the jobs that wait for a host slot, as far as slots are free or can be freed."""
        waiting = self._without_host_slot
        if not waiting:
            return
        full: set[int] = set()  # size classes
        while can_begin := [job for job in waiting if self.device.size_class(job.expert) not in full]:
            job = min(can_begin, key=_turn)
            if self._read_to_host(job):
                waiting.remove(job)
            else:
                full.add(self.device.size_class(job.expert))

    def _unpin_host(self, job: Job) -> None:
        if job.source is Tier.HOST:
            assert self.host is not None
            self.host.unpin(np.array([job.expert]))

    def _give_up(self, job: Job) -> None:
        """The expert does not arrive: free what was reserved for it."""
        if job.bound is Tier.DEVICE:
            self.device.abandon(job.expert)
        self._unpin_host(job)
        if job.target is Tier.HOST and job.target_slot != NO_SLOT:
            assert self.host is not None
            self.host.abandon(job.expert)


def _turn(job: Job) -> int:
    """Of those that wait for a host slot, the least first."""
    return {Reason.ON_DEMAND: 0, Reason.FILL: 2}.get(job.reason, 1)
