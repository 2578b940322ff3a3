"""What a benchmark that reads from disk has to control: the page cache and the device's read-ahead."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np


def files_of(path: Path) -> list[Path]:
    """The file, or all files beneath the folder."""
    return [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())


def drop_cache(paths: Iterable[Path]) -> int:
    """Drop the files (or folders) from the page cache; returns the bytes that stayed.

    Pages that another process has mapped stay. It needs no privilege and touches no other file.
    """
    left = 0
    for path in paths:
        for file in files_of(path):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # only clean pages are dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            left += cached_bytes(file)
    return left


def cached_bytes(file: Path) -> int:
    """How much of the file is in the page cache, by mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0
    page = mmap.PAGESIZE
    pages = np.zeros(-(-size // page), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        address = view.ctypes.data
        del view  # the mapping can not be closed under it
        answer = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))
        )
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return min(size, int((pages & 1).sum()) * page)


class ReadAhead:
    """The read-ahead of the block device that holds ``path``; what it was is put back on exit."""

    def __init__(self, path: Path, *, sys_block: Path = Path("/sys/dev/block")) -> None:
        device = path.stat().st_dev
        found = sys_block / f"{os.major(device)}:{os.minor(device)}"
        candidates = [found / "queue" / "read_ahead_kb", found.resolve().parent / "queue" / "read_ahead_kb"]
        self.file = next((file for file in candidates if file.exists()), None)
        """None where the file system is on no block device of its own."""
        self.original = self.kib

    @property
    def kib(self) -> int | None:
        return None if self.file is None else int(self.file.read_text())

    @property
    def device(self) -> str:
        return "none" if self.file is None else self.file.resolve().parent.parent.name

    @property
    def settable(self) -> bool:
        return self.file is not None and os.access(self.file, os.W_OK)

    def set(self, kib: int) -> None:
        if self.file is None:
            raise OSError("there is no block device to set the read-ahead of")
        self.file.write_text(str(kib))

    def restore(self) -> None:
        if self.original is not None and self.kib != self.original:
            self.set(self.original)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()
