"""What the engine runs on: memory, links and a clock. A replay puts a simulated one in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.experts.arena import Arena
from greenroom.experts.layout import RecordLayout
from greenroom.experts.mover import Job, Mover, Outbox


class Hardware(Protocol):
    """Makes what ``Tiers`` moves experts with, and tells the time in seconds."""

    def arena(self, slots: int, slot_bytes: int, layouts: Sequence[RecordLayout]) -> Arena:
        """The memory of a tier."""
        ...

    def outbox(self) -> Outbox:
        """Where the movers of one engine post what they have finished."""
        ...

    def mover(self, name: str, copy: Callable[[Job], int], outbox: Outbox) -> Mover:
        """One link; ``copy`` moves a job's bytes and returns how many."""
        ...

    def now(self) -> float: ...


class RealHardware:
    """This machine: RAM, one thread a link, and its clock."""

    def arena(self, slots: int, slot_bytes: int, layouts: Sequence[RecordLayout]) -> Arena:
        return Arena(slots, slot_bytes, layouts)

    def outbox(self) -> Outbox:
        return Outbox()

    def mover(self, name: str, copy: Callable[[Job], int], outbox: Outbox) -> Mover:
        return Mover(name, copy, outbox)

    def now(self) -> float:
        return time.perf_counter()
