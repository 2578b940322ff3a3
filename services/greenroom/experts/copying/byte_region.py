"""The memory of whole models: one region of bytes, in which the pieces of records lie anywhere."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import DTYPES, PAGE_BYTES, PIECE_BYTES, ExpertWeights, RecordLayout


class _Tensor(NamedTuple):
    """``piece``: the one that it lies in; ``offset``: bytes from that one's start."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    piece: int
    offset: int


class PiecedRecord:
    """A layout, its pieces' bytes, and where in which piece each tensor lies."""

    def __init__(self, layout: RecordLayout, piece_bytes: int = PIECE_BYTES) -> None:
        """``piece_bytes``: the least of a piece."""
        self.pieces: tuple[int, ...] = layout.pieces(piece_bytes)
        starts = [0, *itertools.accumulate(self.pieces[:-1])]
        self.tensors: list[_Tensor] = []
        for spec in layout.tensors:
            piece = bisect.bisect_right(starts, spec.offset) - 1
            if spec.nbytes == 0 and spec.offset == layout.nbytes:
                piece = 0  # no bytes, behind the last piece
            strides = tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape)))
            self.tensors.append(_Tensor(spec.dtype, spec.shape, strides, piece, spec.offset - starts[piece]))


class ByteRegion:
    """``nbytes`` of RAM, whole pages. All of it is taken at once: to touch a fresh page costs as much as to read it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE_BYTES * PAGE_BYTES
        self._region = page_aligned(self.nbytes, exact=True)
        np.frombuffer(self._region, dtype=np.uint8)[::PAGE_BYTES] = 0
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        memory = torch.frombuffer(self._region, dtype=torch.uint8)
        self._typed = {name: memory.view(dtype) for name, dtype in DTYPES.items()}

    def buffers(self, places: Sequence[int], pieces: Sequence[int]) -> tuple[memoryview, ...]:
        """The bytes of pieces that begin at ``places``, to read a record into."""
        return tuple(self._region[start : start + nbytes] for start, nbytes in zip(places, pieces, strict=True))

    def move(self, source: int, target: int, nbytes: int) -> None:
        """The two may overlap."""
        ctypes.memmove(self._address + target, self._address + source, nbytes)

    def views(self, record: PiecedRecord, places: Sequence[int]) -> ExpertWeights:
        """The tensors of a record whose pieces begin at ``places``: views, valid while they lie there."""
        typed = self._typed
        return tuple(
            torch.as_strided(typed[dtype], shape, strides, (places[piece] + offset) // typed[dtype].itemsize)
            for dtype, shape, strides, piece, offset in record.tensors
        )
