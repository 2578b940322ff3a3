"""What the disk gives when it is asked for records and nothing else: bytes/s, measured when it is asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.harness.closing import Closing
from benchmarks.harness.turn import timed
from greenroom.experts.pack.direct_io import DirectFile, page_aligned
from greenroom.experts.pack.layout import PAGE_BYTES, align

READS = 16
READERS = (1, 2, 4)


class DiskLink(Closing):
    """Direct reads from a pack, each as long as a record of ``nbytes``. The engine reads in its own way; this is what
    it is measured against.
    """

    def __init__(self, pack: Path, nbytes: int) -> None:
        self._random = np.random.default_rng(0)
        self._file = DirectFile(pack)
        record = align(nbytes, PAGE_BYTES)
        self._buffers = [page_aligned(record) for _ in range(max(READERS))]
        for buffer in self._buffers:
            buffer[:] = bytes(record)  # the first touch of a page is not the disk's doing

    def bytes_per_s(self) -> float:
        """Of unchecked reads from random places: the best of several numbers of readers."""
        return max(self._read(readers) for readers in READERS)

    def _read(self, readers: int) -> float:
        nbytes = len(self._buffers[0])
        last = (self._file.size - nbytes) // PAGE_BYTES
        places = (self._random.integers(0, last, READS, endpoint=True) * PAGE_BYTES).tolist()

        def read(reader: int) -> None:
            for place in places[reader::readers]:
                self._file.read_into(place, self._buffers[reader])

        with ThreadPoolExecutor(readers) as pool, timed() as seconds:
            list(pool.map(read, range(readers)))
        return nbytes * READS / seconds[0]

    def close(self) -> None:
        self._file.close()
