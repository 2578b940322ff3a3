"""What the engine runs on: memory, links and a clock. A replay uses a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from greenroom.experts.copying.accelerator import Accelerator
from greenroom.experts.copying.arena import Arena
from greenroom.experts.copying.mover import Carrier, Mover, Outbox
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import RecordLayout


class Hardware(Protocol):
    """Makes the arenas and movers of ``Tiers``, and tells the time in seconds."""

    @property
    def reads(self) -> ReadSettings:
        """How records are read from the disk."""
        ...

    @property
    def accelerator(self) -> Accelerator | None:
        """Whose memory the device tier is; None: the device tier is RAM."""
        ...

    def arena(self, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout]) -> Arena:
        """The memory of a tier in RAM, see ``Slots``."""
        ...

    def outbox(self) -> Outbox:
        """For the results of all movers of one engine."""
        ...

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        """One link. ``carrier`` moves the jobs' bytes."""
        ...

    def now(self) -> float: ...


class RealHardware:
    """This machine: its RAM (page-locked for an accelerator), threads for each link, and its clock."""

    def __init__(self, reads: ReadSettings | None = None, accelerator: Accelerator | None = None) -> None:
        self.reads = reads or ReadSettings()
        self.accelerator = accelerator

    def arena(self, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout]) -> Arena:
        return Arena(slot_bytes, layouts, self.accelerator)

    def outbox(self) -> Outbox:
        return Outbox()

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        return Mover(name, carrier, outbox)

    def now(self) -> float:
        return time.perf_counter()
