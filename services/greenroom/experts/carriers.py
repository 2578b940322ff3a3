"""How records move between the tiers, one Carrier a link and a kind of memory. All run on the movers' threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from greenroom.experts.accelerator import Mark
from greenroom.experts.arena import Arena, DeviceArena
from greenroom.experts.direct_io import ReadSettings
from greenroom.experts.layout import PackManifest
from greenroom.experts.mover import Job, Landing, Outbox
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import Reason, Tier

READ_ATTEMPTS = 2
UPLOADS_IN_FLIGHT = 2


class Store(Protocol):
    """The lowest tier: a pack, or what a test puts in its place. Read by several threads at once."""

    @property
    def manifest(self) -> PackManifest: ...

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        """Fill the page-aligned ``buffer`` with a record's bytes from ``start`` on. Raises OSError."""
        ...

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        """Raises PackError where the whole ``record`` is not what was stored."""
        ...


class DiskReads:
    """Direct reads into slots of arenas in RAM, split as ``reads`` says. A read that fails is tried once more."""

    def __init__(self, store: Store, catalogue: Catalogue, arenas: Mapping[Tier, Arena], reads: ReadSettings) -> None:
        self.threads = reads.threads
        self.depth = reads.depth
        self._store = store
        self._reads = reads
        self._arenas = arenas
        self._layers = catalogue.layer_of
        self._indices = catalogue.index_of
        self._sizes = np.array([layer.layout.nbytes for layer in store.manifest.layers])

    def begin(self, job: Job) -> int:
        nbytes = self._nbytes(job)
        job.part_bytes = self._reads.part_bytes(nbytes, ahead=job.reason is not Reason.ON_DEMAND)
        return -(-nbytes // job.part_bytes)

    def move(self, job: Job, part: int) -> int:
        start = part * job.part_bytes
        buffer = self._buffer(job)[start : min(start + job.part_bytes, self._nbytes(job))]
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                self._store.read_part(*self._place(job), start, buffer)
                break
            except OSError:
                if attempt == READ_ATTEMPTS:
                    raise
        return len(buffer)

    def finish(self, job: Job) -> None:
        self._store.check(*self._place(job), self._buffer(job)[: self._nbytes(job)])

    def drop(self, job: Job) -> None:
        pass

    def close(self) -> None:
        pass

    def _buffer(self, job: Job) -> memoryview:
        return self._arenas[job.target].buffer(job.target_slot)

    def _place(self, job: Job) -> tuple[int, int]:
        return int(self._layers[job.expert]), int(self._indices[job.expert])

    def _nbytes(self, job: Job) -> int:
        return int(self._sizes[self._layers[job.expert]])


@dataclass(slots=True)
class _Berth:
    """A slot of the staging ring; ``left``: reached when what was copied from it last is on the device."""

    slot: int
    left: Mark | None = None


class StagedReads(DiskReads):
    """Disk to device without a host tier: reads into a small page-locked ring, from where whole records are copied.

    A job ends when its copy is queued; a place in the ring is read into again once its copy is done.
    """

    def __init__(
        self, store: Store, catalogue: Catalogue, ring: Arena, device: DeviceArena, reads: ReadSettings
    ) -> None:
        super().__init__(store, catalogue, {Tier.DEVICE: ring}, reads)
        self._device = device
        self._ring = ring
        self._free = deque(_Berth(slot) for slot in range(ring.slots))  # the one left longest ago first
        self._taken: dict[int, _Berth] = {}  # by expert

    @staticmethod
    def ring_slots(reads: ReadSettings) -> int:
        """Enough that a job never finds none: those begun (on demand and ahead), and those being handed on."""
        return 2 * reads.depth + reads.threads + 1

    def begin(self, job: Job) -> int:
        self._taken[job.expert] = self._free.popleft()
        return super().begin(job)

    def move(self, job: Job, part: int) -> int:
        left = self._taken[job.expert].left
        if left is not None:
            left.wait()
        return super().move(job, part)

    def finish(self, job: Job) -> None:
        try:
            super().finish(job)
        except BaseException:
            self.drop(job)
            raise
        berth = self._taken.pop(job.expert)
        try:
            berth.left = self._device.fill(job.target_slot, self._ring.record(berth.slot)[: self._nbytes(job)])
        finally:
            self._free.append(berth)

    def drop(self, job: Job) -> None:
        self._free.append(self._taken.pop(job.expert))

    def close(self) -> None:
        for berth in [*self._free, *self._taken.values()]:
            if berth.left is not None:
                berth.left.wait()

    def _buffer(self, job: Job) -> memoryview:
        return self._ring.buffer(self._taken[job.expert].slot)


class _Undivided:
    """One part a job, and nothing to do after it."""

    def begin(self, job: Job) -> int:
        return 1

    def finish(self, job: Job) -> None:
        pass

    def drop(self, job: Job) -> None:
        pass

    def close(self) -> None:
        pass


class Uploads(_Undivided):
    """Host to device through the device's copy queue, with the next copy queued before the last one has ended.

    What a layer waits for lands when its copy is queued: the compute queue waits for the bytes, the owner need not.
    The job itself ends with the copy, since until then the host's slot is read.
    """

    threads = UPLOADS_IN_FLIGHT
    depth = UPLOADS_IN_FLIGHT

    def __init__(self, host: Arena, device: DeviceArena, outbox: Outbox) -> None:
        self._host = host
        self._device = device
        self._outbox = outbox

    def move(self, job: Job, part: int) -> int:
        filled = self._device.fill(job.target_slot, self._host.record(job.source_slot))
        if job.reason is Reason.ON_DEMAND:
            self._outbox.post(Landing(job))
        filled.wait()
        return self._host.slot_bytes


class Copies(_Undivided):
    """Host to device where both are RAM."""

    threads = 1
    depth = 1

    def __init__(self, host: Arena, device: Arena) -> None:
        self._host = host
        self._device = device

    def move(self, job: Job, part: int) -> int:
        self._device.record(job.target_slot).copy_(self._host.record(job.source_slot))
        return self._device.slot_bytes
