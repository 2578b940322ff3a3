"""The memory of one sequence's keys and values: addresses for all it may become, and pages for what was written.

On the CPU it is an anonymous mapping. A page of it takes memory from the first write on, until it is given back. On a
device all of it takes memory at once.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from greenroom.moe.attention.kv_layout import KVLayout

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python does not name."""


class KVMemory:
    """Room for ``rows`` tokens: ``numbers`` of the layout's dtype. ``shared``: it serves one sequence after the other.

    Up to ``KVLayout.dense_rows`` tokens take the first bytes of it. More take the first pages of each head's part.
    Both are counted apart, so pages that belong to both count twice: ``touched_bytes`` is never too low.
    """

    __slots__ = ("_layout", "dense_bytes", "numbers", "paged_rows", "rows", "shared")

    def __init__(self, layout: KVLayout, rows: int, *, shared: bool = False) -> None:
        self._layout = layout
        self.rows = rows if rows <= layout.dense_rows else -(-rows // layout.page_rows) * layout.page_rows
        self.shared = shared
        self.numbers = _lazy_memory(layout, layout.nbytes(rows))
        self.dense_bytes = 0
        self.paged_rows = 0

    @property
    def touched_bytes(self) -> int:
        """At most so much of it has been written to."""
        return self.dense_bytes + self.paged_rows * self._layout.bytes_per_token

    def hold(self, capacity: int) -> None:
        """The first ``capacity`` rows may be written from now on."""
        layout = self._layout
        if capacity <= layout.dense_rows:
            self.dense_bytes = max(self.dense_bytes, layout.nbytes(capacity))
        else:
            self.paged_rows = max(self.paged_rows, -(-capacity // layout.page_rows) * layout.page_rows)

    def trim(self, capacity: int) -> None:
        """Give back all pages but those of the first ``capacity`` rows. On the CPU only."""
        layout = self._layout
        if capacity <= layout.dense_rows:
            self.dense_bytes, self.paged_rows = layout.nbytes(capacity), 0
            self._give_back(self.dense_bytes, layout.nbytes(self.rows))
            return
        self.dense_bytes, self.paged_rows = 0, -(-capacity // layout.page_rows) * layout.page_rows
        start = 0
        for row_bytes in layout.row_bytes:
            stop = start + self.rows * row_bytes
            self._give_back(start + self.paged_rows * row_bytes, stop)
            start = stop

    def _give_back(self, start: int, stop: int) -> None:
        if stop > start:
            _madvise()(self.numbers.data_ptr() + start, stop - start, mmap.MADV_DONTNEED)


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mapped_bytes() -> int:
    """Bytes of KV memory of all stores of this process that are still mapped. Tests check it for leaks."""
    gc.collect()
    return sum(len(mapping) for mapping in _mappings)


def _lazy_memory(layout: KVLayout, nbytes: int) -> torch.Tensor:
    if layout.device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=layout.device).view(layout.dtype)
    # Not torch.empty: the C allocator keeps freed memory, and pages that were touched would stay resident. Addresses
    # for the longest sequence are no promise of memory, so the system need not set any apart.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    mapping = mmap.mmap(-1, nbytes, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take memory for rows that may never come
    _mappings.add(mapping)
    return torch.frombuffer(mapping, dtype=layout.dtype)


@functools.cache
def _madvise() -> Callable[[int, int, int], Any]:
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
