"""What the link to a GPU gives when it copies records and nothing else: bytes/s, measured when it is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from benchmarks.harness.closing import Closing
from benchmarks.harness.turn import timed
from greenroom.experts.copying.accelerator import Accelerator, Mark
from greenroom.experts.pack.layout import PAGE_BYTES, align

COPIES = 32
RECORDS = 4
"""In RAM and on the device, in turn: more than one, so that no cache answers."""


class UploadLink(Closing):
    """Copies from page-locked RAM, each as long as a record of ``nbytes``, one behind the other in the copy queue."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        record = align(nbytes, PAGE_BYTES)
        self._accelerator = accelerator
        self._region = mmap.mmap(-1, record * RECORDS)
        view = memoryview(self._region)
        self._unlock: Callable[[], None] = accelerator.lock_pages(view)
        there, here = accelerator.allocate(record * RECORDS), torch.frombuffer(view, dtype=torch.uint8)
        self._pairs = list(zip(torch.split(there, record), torch.split(here, record), strict=True))
        self.bytes_per_s()  # the first touch of a page is not the link's doing

    def bytes_per_s(self) -> float:
        last: Mark | None = None
        with timed() as seconds:
            for number in range(COPIES):
                target, source = self._pairs[number % RECORDS]
                last = self._accelerator.copy(target, source, None)
            assert last is not None
            last.wait()
        return len(self._pairs[0][0]) * COPIES / seconds[0]

    def close(self) -> None:
        """The RAM is freed with the last tensor that looks at it."""
        self._unlock()
        self._pairs.clear()
