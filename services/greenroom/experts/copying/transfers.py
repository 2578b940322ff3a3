"""How records move between the tiers: one Carrier for each kind of link. All run on the movers' threads.

A carrier keeps ``contents`` of the arena that it fills: NOTHING from the beginning of a job, the expert once all of its
bytes have arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from greenroom.experts.copying.arena import NOTHING, Arena, DeviceArena, Slots
from greenroom.experts.copying.mover import Job, Landing, Outbox
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import PackManifest
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_keys import Catalogue

READ_ATTEMPTS = 2
UPLOADS_IN_FLIGHT = 2


class Store(Protocol):
    """The lowest tier: a pack, or a test's stand-in. Several threads read it at once."""

    @property
    def manifest(self) -> PackManifest: ...

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        """Fill the page-aligned ``buffer`` with the record's bytes from ``start``. Raises OSError."""
        ...

    def is_checked(self, layer: int, expert: int) -> bool:
        """Whether the record is known to be what was stored, so that checking it again takes no time."""
        ...

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        """Raises PackError if the whole ``record`` is not what was stored."""
        ...


class _NothingToDrop:
    """What has been moved in part is nobody's, and nothing is to be closed."""

    def drop(self, job: Job) -> None:
        pass

    def close(self) -> None:
        pass


class RecordReads(_NothingToDrop, ABC):
    """Reads of whole records, split as ``reads`` says. A read that fails is tried once more."""

    def __init__(self, reads: ReadSettings) -> None:
        self.threads = reads.threads
        self.depth = reads.depth
        self._reads = reads

    def begin(self, job: Job) -> int:
        nbytes = self._nbytes(job)
        job.part_bytes = self._reads.part_bytes(nbytes, prefetch=job.reason is not Reason.ON_DEMAND)
        return -(-nbytes // job.part_bytes)

    def move(self, job: Job, part: int) -> int:
        start = part * job.part_bytes
        stop = min(start + job.part_bytes, self._nbytes(job))
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                self._read(job, start, stop)
                break
            except OSError:
                if attempt == READ_ATTEMPTS:
                    raise
        return stop - start

    @abstractmethod
    def _read(self, job: Job, start: int, stop: int) -> None:
        """Read these bytes of the record to where they belong. Raises OSError."""

    @abstractmethod
    def _nbytes(self, job: Job) -> int:
        """Of the record."""


class DiskReads(RecordReads):
    """Direct reads into arenas in RAM."""

    def __init__(self, store: Store, catalogue: Catalogue, arenas: Mapping[Tier, Arena], reads: ReadSettings) -> None:
        super().__init__(reads)
        self._store = store
        self._arenas = arenas
        self._layers = catalogue.layer_of
        self._indices = catalogue.index_of
        self._sizes = np.array([layer.layout.nbytes for layer in store.manifest.layers])

    def begin(self, job: Job) -> int:
        self._target(job).contents[job.target_slot] = NOTHING
        return super().begin(job)

    def ends_at_once(self, job: Job) -> bool:
        return self._store.is_checked(*self._place(job))

    def finish(self, job: Job) -> None:
        self._check(job)
        self._target(job).contents[job.target_slot] = job.expert

    def _read(self, job: Job, start: int, stop: int) -> None:
        self._store.read_part(*self._place(job), start, self._buffer(job)[start:stop])

    def _check(self, job: Job) -> None:
        """Raises PackError if the record that was read is not what was stored."""
        self._store.check(*self._place(job), self._buffer(job)[: self._nbytes(job)])

    def _target(self, job: Job) -> Slots:
        return self._arenas[job.target]

    def _buffer(self, job: Job) -> memoryview:
        return self._arenas[job.target].buffer(job.target_slot)

    def _place(self, job: Job) -> tuple[int, int]:
        return int(self._layers[job.expert]), int(self._indices[job.expert])

    def _nbytes(self, job: Job) -> int:
        return int(self._sizes[self._layers[job.expert]])


class StagedReads(DiskReads):
    """Disk to device without a host tier: reads into a small page-locked ring, and copies whole records from there.

    An expert that a layer waits for lands when its copy is queued. The job ends when the copy ends, which the mover's
    thread waits for. Only then is its place in the ring free, and known whether the bytes arrived.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        ring: Arena,
        device: DeviceArena,
        reads: ReadSettings,
        outbox: Outbox,
    ) -> None:
        super().__init__(store, catalogue, {Tier.DEVICE: ring}, reads)
        self._device = device
        self._ring = ring
        self._outbox = outbox
        self._free = deque(range(ring.slots))
        self._taken: dict[int, int] = {}  # by expert, a slot of the ring

    @staticmethod
    def ring_slots(reads: ReadSettings) -> int:
        """Enough for all jobs that have begun (on demand and prefetches), and for those that are being copied on."""
        return 2 * reads.depth + reads.threads + 1

    def begin(self, job: Job) -> int:
        self._taken[job.expert] = self._free.popleft()
        return super().begin(job)

    def ends_at_once(self, job: Job) -> bool:
        return False  # it waits for the copy

    def finish(self, job: Job) -> None:
        try:
            self._check(job)
            record = self._ring.record(self._taken[job.expert])[: self._nbytes(job)]
            _hand_over(job, record, self._device, self._outbox)
        finally:
            self.drop(job)

    def drop(self, job: Job) -> None:
        self._free.append(self._taken.pop(job.expert))

    def _target(self, job: Job) -> Slots:
        return self._device

    def _buffer(self, job: Job) -> memoryview:
        return self._ring.buffer(self._taken[job.expert])


def _hand_over(job: Job, record: torch.Tensor, device: DeviceArena, outbox: Outbox) -> None:
    """Copy ``record`` to the job's slot. Returns once the bytes have arrived, and raises if they did not.

    An expert that a layer waits for lands once the copy is queued: the compute queue waits for the bytes, so the
    engine's thread need not.
    """
    filled = device.fill(job.target_slot, record)
    if job.reason is Reason.ON_DEMAND:
        outbox.post(Landing(job))
    filled.wait()
    device.contents[job.target_slot] = job.expert


class _Undivided(_NothingToDrop):
    """Jobs of one part, with nothing to do after it."""

    def ends_at_once(self, job: Job) -> bool:
        return True

    def finish(self, job: Job) -> None:
        pass


class Uploads(_Undivided):
    """Host to device through the copy queue. The next copy is queued before the last one has ended."""

    threads = UPLOADS_IN_FLIGHT
    depth = UPLOADS_IN_FLIGHT

    def __init__(self, host: Arena, device: DeviceArena, outbox: Outbox) -> None:
        self._host = host
        self._device = device
        self._outbox = outbox

    def begin(self, job: Job) -> int:
        self._device.contents[job.target_slot] = NOTHING
        return 1

    def move(self, job: Job, part: int) -> int:
        _hand_over(job, self._host.record(job.source_slot), self._device, self._outbox)
        return self._host.slot_bytes[job.source_slot]


class Copies(_Undivided):
    """Host to device, both in RAM."""

    threads = 1
    depth = 1

    def __init__(self, host: Arena, device: Arena) -> None:
        self._host = host
        self._device = device

    def begin(self, job: Job) -> int:
        self._device.contents[job.target_slot] = NOTHING
        return 1

    def move(self, job: Job, part: int) -> int:
        self._device.record(job.target_slot).copy_(self._host.record(job.source_slot))
        return self._device.slot_bytes[job.target_slot]

    def finish(self, job: Job) -> None:
        self._device.contents[job.target_slot] = job.expert
