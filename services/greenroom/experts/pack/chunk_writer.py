"""Writes a file behind its caller's back: in chunks, several at once, past the page cache where the file system can."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.units import MIB
from greenroom.experts.pack.direct_io import page_aligned

CHUNK_BYTES: Final = 4 * MIB
THREADS: Final = 3
"""Chunks that are with the disk at once."""

SYNC_BYTES: Final = 32 * MIB
"""After so many the disk is asked to make durable what it has, while more is made. Left to one sync at the end, that
took two fifths of the time in which a pack was written."""

_BUFFERS: Final = THREADS + 2


class ChunkWriter:
    """Writes into the file at ``path``, which is there. ``fd`` is the same file, open for buffered writes.

    Bytes are copied into a few chunks that are reused, so memory does not depend on the file's size. ``append`` waits
    where the disk is slower than the caller. The disk syncs meanwhile, all but what was written last. A write or a sync
    that fails is told by a later call, and by each one after that. Where the file system refuses direct writes, they go
    through the page cache. Not thread-safe. It is to be closed before ``fd``.
    """

    def __init__(self, path: Path, fd: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """``chunk_bytes``: a multiple of 4 KiB. Raises OSError."""
        self._fd = fd
        self._direct_fd = _open_direct(path)
        self._direct = self._direct_fd is not None
        self._free = [page_aligned(chunk_bytes) for _ in range(_BUFFERS)]
        self._chunk = self._free.pop()
        self._offset = 0  # of the chunk within the file
        self._filled = 0
        self._writes: deque[tuple[Future[None], memoryview]] = deque()
        self._unsynced = 0  # bytes that were handed over since the last sync began
        self._sync: Future[None] | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pack writer")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="pack sync")

    def seek(self, offset: int) -> None:
        """The next bytes go to ``offset``, a multiple of 4 KiB. Raises OSError."""
        if offset != self._offset + self._filled:
            self._submit()
            self._offset = offset

    def append(self, data: NDArray[np.uint8]) -> None:
        """The file's next bytes. Before another ``seek`` or ``flush`` they are to reach a multiple of 4 KiB.

        Raises OSError.
        """
        while len(data):
            if self._filled == len(self._chunk):
                self._submit()
            count = min(len(data), len(self._chunk) - self._filled)
            # numpy copies without the interpreter's lock and without torch's threads, which would take the cores
            # from those that write.
            np.copyto(np.frombuffer(self._chunk, np.uint8)[self._filled : self._filled + count], data[:count])
            self._filled += count
            data = data[count:]

    def flush(self) -> None:
        """Wait until all is written, though not yet synced. Raises OSError."""
        self._submit()
        while self._writes:
            self._free.append(self._written())
        if self._sync is not None:
            self._sync.result()

    def close(self) -> None:
        """Wait for the writes that are under way, and drop the others. Raises nothing."""
        for pool in (self._pool, self._syncer):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def _submit(self) -> None:
        """Hand the chunk over and take another. Nothing changes if that raises."""
        if not self._filled:
            return
        if not self._free:
            self._free.append(self._written())
        self._sync_on()
        write = self._pool.submit(self._write, self._chunk[: self._filled], self._offset)
        self._writes.append((write, self._chunk))
        self._offset += self._filled
        self._unsynced += self._filled
        self._chunk, self._filled = self._free.pop(), 0

    def _sync_on(self) -> None:
        """Have the disk sync, if enough was written and the last sync is done. One that failed stays, as a write does:
        the kernel tells of it once, so a later sync would be told that all is well."""
        if self._sync is not None and self._sync.done():
            self._sync.result()
            self._sync = None
        if self._sync is None and self._unsynced >= SYNC_BYTES:
            self._sync, self._unsynced = self._syncer.submit(os.fdatasync, self._fd), 0

    def _written(self) -> memoryview:
        """The oldest chunk, once it is written. One that failed stays, so that each later call tells of it."""
        write, chunk = self._writes[0]
        write.result()
        self._writes.popleft()
        return chunk

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            direct = self._direct_fd if self._direct else None
            try:
                count = os.pwrite(self._fd if direct is None else direct, data, offset)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                self._direct = False  # some open a file so and refuse the write; or a short write left an odd rest
                continue
            data, offset = data[count:], offset + count


def _open_direct(path: Path) -> int | None:
    """None: the file system has no direct writes. Raises OSError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
