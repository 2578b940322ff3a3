"""The memory of a tier: slots in one page-aligned region."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.experts.copying.accelerator import Accelerator, Mark
from greenroom.experts.copying.fresh_pages import FreshPages
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout

NOTHING = -1
"""In place of an expert: the slot holds no whole record."""


class Slots:
    """Slots of ``slot_bytes[slots]``, one behind the other in ``memory`` (uint8), and the tensors of records in them.

    ``layouts``: of each layer's records. ``contents[slots]``: the expert whose whole record lies in the slot, or
    NOTHING. The carriers write it, without the ledger; the audit compares the two.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout]) -> None:
        self.slots = slots = len(slot_bytes)
        self.slot_bytes = slot_bytes
        self.contents: NDArray[np.int64] = np.full(slots, NOTHING, dtype=np.int64)
        self._memory = memory
        self._starts = [0, *itertools.accumulate(slot_bytes)]
        distinct = list(dict.fromkeys(layouts))
        self._layouts = [(distinct.index(layout), layout) for layout in layouts]
        self._views: list[list[ExpertWeights | None]] = [[None] * slots for _ in distinct]

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def record(self, slot: int) -> torch.Tensor:
        """The slot's bytes as a uint8 tensor."""
        return self._memory[self._starts[slot] : self._starts[slot + 1]]

    def weights(self, slot: int, layer: int) -> ExpertWeights:
        """The tensors of the layer's record in the slot: views, made once for each slot and layout."""
        number, layout = self._layouts[layer]
        views = self._views[number][slot]
        if views is None:
            views = self._views[number][slot] = layout.views(self.record(slot))
        return views


class Arena(Slots):
    """Slots in RAM. A page that was never written to takes no memory.

    ``slot_bytes`` are multiples of 4 KiB, so a direct read can fill any slot. With an ``accelerator`` the region is
    page-locked, and takes all of its memory from the start.
    """

    def __init__(
        self, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout], accelerator: Accelerator | None = None
    ) -> None:
        self._region = page_aligned(sum(slot_bytes))
        self._fresh: FreshPages | None = None
        self._unlock: Callable[[], None] | None = None if accelerator is None else accelerator.lock_pages(self._region)
        super().__init__(torch.frombuffer(self._region, dtype=torch.uint8), slot_bytes, layouts)

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes, to read a record into."""
        return self._region[self._starts[slot] : self._starts[slot + 1]]

    def take_pages(self, slots: int) -> None:
        """Begin to take the memory of the first ``slots``, ahead of what fills them; once. Returns at once."""
        if self._fresh is None and self._unlock is None:
            self._fresh = FreshPages(self._region[: self._starts[slots]])

    def close(self) -> None:
        """Free the pages. No copy from them may be queued or running."""
        if self._fresh is not None:
            self._fresh.close()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


class DeviceArena(Slots):
    """Slots in an accelerator's memory. Its copy queue fills them and its compute queue reads them.

    A slot is read after it was filled (``weights``), and filled again after the work that reads it (``released``,
    ``fill``). Both orders hold because one queue waits for a mark in the other; no thread waits. Two fills keep their
    order, because they are in one queue. The first fill waits for all earlier work of the compute queue, because torch
    reuses memory while work on its former contents is still queued.
    """

    def __init__(self, accelerator: Accelerator, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout]) -> None:
        super().__init__(accelerator.allocate(sum(slot_bytes)), slot_bytes, layouts)
        self._accelerator = accelerator
        self._filled: list[Mark | None] = [None] * self.slots  # None: the compute queue waits for it already
        self._used: list[Mark] = [accelerator.mark()] * self.slots  # the last use by the compute queue

    def fill(self, slot: int, source: torch.Tensor) -> Mark:
        """Queue the copy of a record into a reserved slot. Called by a mover. At the mark ``source`` can be reused."""
        filled = self._accelerator.copy(self.record(slot)[: source.numel()], source, after=self._used[slot])
        self._filled[slot] = filled
        return filled

    def weights(self, slot: int, layer: int) -> ExpertWeights:
        """As Slots. Work that is queued for computing after this call finds the record in place."""
        filled = self._filled[slot]
        if filled is not None:
            self._accelerator.wait_for(filled)
            self._filled[slot] = None
        return super().weights(slot, layer)

    def released(self, slots: Sequence[int]) -> None:
        """All work that reads these slots is in the compute queue now."""
        mark = self._accelerator.mark()
        for slot in slots:
            self._used[slot] = mark

    def all_released(self) -> None:
        """As ``released``, of every slot."""
        self._used = [self._accelerator.mark()] * self.slots
