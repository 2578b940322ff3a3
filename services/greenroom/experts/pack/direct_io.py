"""Reads past the page cache, straight into the caller's memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB, format_bytes
from greenroom.experts.pack.layout import PAGE_BYTES, align

HUGE_PAGE_BYTES = 2 * MIB
"""On x86-64, and on arm64 with 4 KiB pages."""

PREFETCH_READ_BYTES = 8 * MIB
"""The longest read of a prefetch. It limits how long an on-demand fetch waits for the disk."""


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """How records are read: in parts of at most ``read_bytes`` (None: whole), ``threads`` parts at once, of ``depth``
    records. Raises InvalidConfig.
    """

    read_bytes: int | None = None
    threads: int = 1
    depth: int = 1

    def __post_init__(self) -> None:
        if self.read_bytes is not None and (self.read_bytes < PAGE_BYTES or self.read_bytes % PAGE_BYTES):
            raise InvalidConfig("read_bytes", self.read_bytes, f"a multiple of {PAGE_BYTES}")
        for name in ("threads", "depth"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "at least 1")

    def part_bytes(self, nbytes: int, *, prefetch: bool) -> int:
        """The size of the parts of a record of ``nbytes``. All are equal except the last."""
        longest = self.read_bytes or nbytes
        if prefetch:
            longest = min(longest, PREFETCH_READ_BYTES)
        return align(-(-nbytes // -(-nbytes // longest)), PAGE_BYTES)

    def describe(self) -> str:
        size = "whole records" if self.read_bytes is None else f"{format_bytes(self.read_bytes)} pieces"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{size}, {threads}, {self.depth} in flight"


_MOST_BUFFERS = 1024
"""Of one call (IOV_MAX)."""


def page_aligned(nbytes: int, *, exact: bool = False) -> memoryview:
    """Zeroed memory that starts on a page. Pages that are never touched take no memory.

    ``exact``: no huge page reaches past the region's end. Else a little more than the region may be taken.

    If the region can hold a huge page, it asks for huge pages. A direct read into them is a few long transfers instead
    of thousands of single pages: twice as fast, and with less processor time (docs/decisions/0016).
    """
    size = align(max(nbytes, 1), PAGE_BYTES)
    if size < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    region = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            if exact:
                region.madvise(mmap.MADV_NOHUGEPAGE)
                region.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
            else:
                region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)[start : start + size]


class DirectFile:
    """A file opened for direct reads. If the file system refuses them, reads leave nothing in the page cache.

    Thread-safe, because each read names its offset.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._fd = os.open(path, flags)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        """Fill the ``buffers``, one after the other. Offset, addresses and lengths must be multiples of 4 KiB.

        Raises OSError, EOFError.
        """
        left = deque(buffer for buffer in buffers if len(buffer))
        done = 0
        while left:
            count = os.preadv(self._fd, tuple(itertools.islice(left, _MOST_BUFFERS)), offset + done)
            if count == 0:
                raise EOFError(f"{self._fd}: the file ends within a record")
            done += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
        if not self.direct:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` from ``offset`` (a multiple of 4 KiB), fewer at the file's end."""
        buffer = page_aligned(nbytes)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            done += count
            if count == 0 or count % PAGE_BYTES:
                break
        return bytes(buffer[: min(done, nbytes)])

    def read_unaligned(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` from any offset."""
        start = offset // PAGE_BYTES * PAGE_BYTES
        return self.read(start, offset - start + nbytes)[offset - start :][:nbytes]

    def modified_ns(self) -> int:
        """When it was last written to."""
        return os.fstat(self._fd).st_mtime_ns

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` still names this file, and not one that has replaced it. Raises OSError."""
        return os.path.samestat(os.fstat(self._fd), path.stat())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
