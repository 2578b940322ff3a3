"""Takes fresh memory ahead of what fills it.

A page of a new mapping costs the kernel a fault and a clearing, when it is first written to. Within a direct read that
is time in which the disk is idle. Here threads of their own do it, which share the region's pages in ascending order.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Final

from greenroom.experts.pack.direct_io import HUGE_PAGE_BYTES

MOST_THREADS: Final = 4

_CLOSE_S: Final = 10.0
"""Taking a huge page takes milliseconds."""

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later. It changes no byte, so a read may fill the same page meanwhile."""


class FreshPages:
    """Populates ``region``, which begins on a huge page, from its start on.

    A huge page at a time, because a thread that maps or frees memory waits for the one that is being taken. Where the
    kernel can not do it the threads end at once, and reads take their pages themselves.
    """

    def __init__(self, region: memoryview, threads: int | None = None) -> None:
        """``threads``: as many as cores, and at most four."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._region = region  # keeps the memory
        self._end = len(region)
        self._next = 0
        self._lock = threading.Lock()
        count = min(MOST_THREADS, len(os.sched_getaffinity(0))) if threads is None else threads
        self._threads = [threading.Thread(target=self._run, name=f"pages {n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """False: the time ran out."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop after the pages that are being taken. Before the region is let go. A thread that the kernel keeps longer
        holds the region by itself."""
        with self._lock:
            self._next = self._end
        self.wait(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                start, self._next = self._next, self._next + HUGE_PAGE_BYTES
            if start >= self._end:
                return
            nbytes = min(HUGE_PAGE_BYTES, self._end - start)
            address = ctypes.c_void_p(self._address + start)
            if self._libc.madvise(address, ctypes.c_size_t(nbytes), _POPULATE_WRITE):
                return
