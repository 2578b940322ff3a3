"""The memory of a tier: equal slots in one page-aligned region."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from greenroom.experts.direct_io import page_aligned
from greenroom.experts.layout import RecordLayout
from greenroom.experts.source import ExpertWeights


class Arena:
    """``slots`` × ``slot_bytes`` of RAM; a page that was never written to is not resident.

    ``slot_bytes`` is a multiple of 4 KiB, so every slot can be the target of a direct read. ``layouts``: that of
    every layer's records.
    """

    def __init__(self, slots: int, slot_bytes: int, layouts: Sequence[RecordLayout]) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._region = page_aligned(slots * slot_bytes)
        self._bytes = torch.frombuffer(self._region, dtype=torch.uint8)
        distinct = list(dict.fromkeys(layouts))
        self._layouts = [(distinct.index(layout), layout) for layout in layouts]
        self._views: list[list[ExpertWeights | None]] = [[None] * slots for _ in distinct]

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes, to read a record into."""
        return self._region[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def record(self, slot: int) -> torch.Tensor:
        """The slot's bytes as a uint8 tensor."""
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def weights(self, slot: int, layer: int) -> ExpertWeights:
        """The tensors of the layer's record in the slot; views, made once for each slot and layout."""
        number, layout = self._layouts[layer]
        views = self._views[number][slot]
        if views is None:
            views = self._views[number][slot] = layout.views(self.record(slot))
        return views
