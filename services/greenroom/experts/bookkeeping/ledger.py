"""Bookkeeping of one tier: which expert is in which slot, on its way, pinned, or prefetched.

Knows nothing of memory, threads or policies. Used only by the thread that owns the engine.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.experts.bookkeeping.prefetch_use import PrefetchUse
from greenroom.policies.base.array_types import Counts, Keys, Mask
from greenroom.policies.base.slot_sizes import SlotSizes

NO_SLOT = -1


class State(IntEnum):
    """Of one expert in one tier."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


# Used a few times for every transfer. In Python 3.11 access to an enumeration's members is slow.
ABSENT, LOADING, RESIDENT = map(int, State)


class LedgerError(GreenroomError):
    """A plan would break an invariant of the ledger. Nothing was changed. This is a defect, never bad input."""


class Ledger:
    """The first ``slots`` of one tier and the experts in them. An expert is only ever in slots of its own size class.

    Invariants, checked by ``audit``: free + loading + resident = slots. An expert has a slot, one of its class, exactly
    while it is loading or resident. No slot has two experts. An expert that is pinned or loading is never evicted.
    """

    def __init__(self, sizes: SlotSizes, slots: int) -> None:
        experts = sizes.experts
        self.sizes = sizes
        self.slots = slots
        self.residents = 0
        """Resident experts."""
        self.departures = 0
        """How often an expert was evicted or abandoned. While it stays the same, no slot was freed."""
        self.changed: set[int] = set()
        """Experts that have arrived or were evicted since a follower last emptied it."""
        self.prefetches = PrefetchUse(experts)
        self.state: NDArray[np.uint8] = np.zeros(experts, dtype=np.uint8)
        self.slot_of: NDArray[np.int64] = np.full(experts, NO_SLOT, dtype=np.int64)
        self.resident: NDArray[np.bool_] = np.zeros(experts, dtype=np.bool_)
        self.absent: NDArray[np.bool_] = np.ones(experts, dtype=np.bool_)
        """``[experts]``: neither resident nor loading. Not to be written to, as the arrays above."""
        self._pins = [0] * experts  # by expert; a layer picks few, so plain numbers are sooner counted than arrays
        self._unpinned: NDArray[np.bool_] = np.ones(experts, dtype=np.bool_)
        self._classes: list[int] = sizes.class_of.tolist()
        order = sizes.order[:slots]
        self._free: list[list[int]] = [
            np.flatnonzero(order == number)[::-1].tolist() for number in range(sizes.classes)
        ]
        self.places: Counts = sizes.places(slots)
        """``[classes]``: how many slots each has."""
        self.free = slots
        """Slots that hold nothing, of all classes."""

    @property
    def slot_bytes(self) -> list[int]:
        """Of each slot."""
        return self.sizes.slot_bytes(self.slots)

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.sizes.nbytes(self.slots)

    def size_class(self, expert: int) -> int:
        """Whose slots the expert may be in."""
        return self._classes[expert]

    def bytes_of(self, expert: int) -> int:
        """Of the slots that the expert may be in."""
        return int(self.sizes.bytes_of[self._classes[expert]])

    def free_in(self, size_class: int) -> int:
        """Slots of the class that hold nothing."""
        return len(self._free[size_class])

    @property
    def loading(self) -> int:
        """Experts on their way."""
        return self.slots - self.free - self.residents

    @property
    def open_classes(self) -> list[int]:
        """The classes that have a free slot."""
        return [number for number, free in enumerate(self._free) if free]

    @property
    def free_places(self) -> Counts:
        """``[classes]``: how many slots of each hold nothing."""
        return np.array([len(free) for free in self._free])

    def evictable(self) -> Mask:
        """``[experts]``: resident and not pinned."""
        return self.resident & self._unpinned

    def evictable_in(self, size_class: int) -> Mask:
        """``[experts]``: those of the class that are resident and not pinned."""
        return self.in_class(self.evictable(), size_class)

    def in_class(self, experts: Mask, size_class: int) -> Mask:
        """Those of ``experts`` that are in slots of the class, or would be."""
        return experts if self.sizes.classes == 1 else experts & self.sizes.members[size_class]

    def reserve(self, expert: int) -> int:
        """Give an absent expert a free slot of its class, for its transfer to fill. Returns the slot."""
        if self.state[expert] != ABSENT:
            raise LedgerError(f"expert {expert} is {State(self.state[expert]).name.lower()} already")
        free = self._free[self._classes[expert]]
        if not free:
            raise LedgerError(f"no free slot for expert {expert}")
        slot = free.pop()
        self.free -= 1
        self.state[expert] = LOADING
        self.absent[expert] = False
        self.slot_of[expert] = slot
        return slot

    def arrived(self, expert: int) -> None:
        """Its transfer filled the slot."""
        if self.state[expert] != LOADING:
            raise LedgerError(f"expert {expert} was not on its way")
        self.state[expert] = RESIDENT
        self.resident[expert] = True
        self.residents += 1
        self.changed.add(expert)

    def abandon(self, expert: int) -> None:
        """Its transfer failed or was withdrawn: its slot is free again."""
        if self.state[expert] != LOADING:
            raise LedgerError(f"expert {expert} was not on its way")
        self._release(expert)

    def evict(self, expert: int) -> None:
        """Free the slot of a resident expert."""
        if self.state[expert] != RESIDENT:
            raise LedgerError(f"expert {expert} is {State(self.state[expert]).name.lower()}, not resident")
        if self._pins[expert]:
            raise LedgerError(f"expert {expert} is pinned")
        self._release(expert)
        self.resident[expert] = False
        self.residents -= 1
        self.changed.add(expert)

    def pin(self, experts: Keys) -> None:
        """Keep distinct experts from being evicted, present or not, until each is unpinned as often."""
        pins = self._pins
        for expert in experts.tolist():
            pins[expert] += 1
        self._unpinned[experts] = False

    def unpin(self, experts: Keys) -> None:
        """Undo one ``pin`` of distinct experts."""
        pins, keys = self._pins, experts.tolist()
        if not all(pins[expert] for expert in keys):
            raise LedgerError("unpinned what was not pinned")
        for expert in keys:
            pins[expert] -= 1
            if not pins[expert]:
                self._unpinned[expert] = True

    @property
    def pinned(self) -> int:
        """Experts with at least one pin."""
        return sum(map(bool, self._pins))

    def audit(self) -> None:
        """Raises LedgerError where an invariant does not hold."""
        held = np.flatnonzero(self.slot_of != NO_SLOT)
        occupied = np.flatnonzero(self.state != ABSENT)
        if not np.array_equal(occupied, np.flatnonzero(~self.absent)):
            raise LedgerError("the absent set and the states disagree")
        free = [slot for of_class in self._free for slot in of_class]
        slots = np.sort(np.concatenate([self.slot_of[held], np.array(free, dtype=np.int64)]))
        if not np.array_equal(held, occupied):
            raise LedgerError("slots and states disagree")
        if not np.array_equal(slots, np.arange(self.slots)):
            raise LedgerError("a slot is lost, or held twice")
        if len(free) != self.free:
            raise LedgerError(f"{len(free)} slots are free, not {self.free}")
        if not np.array_equal(self.sizes.order[self.slot_of[held]], self.sizes.class_of[held]):
            raise LedgerError("an expert is in a slot of another class")
        if any((self.sizes.order[slots] != number).any() for number, slots in enumerate(self._free)):
            raise LedgerError("a slot is free in another class")
        if not np.array_equal(self.resident, self.state == RESIDENT) or self.residents != self.resident.sum():
            raise LedgerError("the resident set and the states disagree")
        if min(self._pins, default=0) < 0:
            raise LedgerError("a negative pin")
        if [not count for count in self._pins] != self._unpinned.tolist():
            raise LedgerError("the pins and their mask disagree")

    def _release(self, expert: int) -> None:
        self.departures += 1
        self._free[self._classes[expert]].append(int(self.slot_of[expert]))
        self.free += 1
        self.slot_of[expert] = NO_SLOT
        self.state[expert] = ABSENT
        self.absent[expert] = True
