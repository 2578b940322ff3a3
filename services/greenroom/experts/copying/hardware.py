"""What the engine runs on: memory, links and a clock. A replay puts a simulated one in its place."""

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
    """Makes what ``Tiers`` moves experts with, and tells the time in seconds."""

    @property
    def reads(self) -> ReadSettings:
        """How records are read from the disk."""
        ...

    @property
    def accelerator(self) -> Accelerator | None:
        """Where the device tier is; None: in RAM."""
        ...

    def arena(self, slots: int, slot_bytes: int, layouts: Sequence[RecordLayout]) -> Arena:
        """The memory of a tier that is RAM."""
        ...

    def outbox(self) -> Outbox:
        """Where the movers of one engine post what they have finished."""
        ...

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        """One link; ``carrier`` moves the jobs' bytes."""
        ...

    def now(self) -> float: ...


class RealHardware:
    """This machine: RAM, threads for each link, and its clock. RAM is page-locked where there is an accelerator."""

    def __init__(self, reads: ReadSettings | None = None, accelerator: Accelerator | None = None) -> None:
        self.reads = reads or ReadSettings()
        self.accelerator = accelerator

    def arena(self, slots: int, slot_bytes: int, layouts: Sequence[RecordLayout]) -> Arena:
        return Arena(slots, slot_bytes, layouts, self.accelerator)

    def outbox(self) -> Outbox:
        return Outbox()

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        return Mover(name, carrier, outbox)

    def now(self) -> float:
        return time.perf_counter()
