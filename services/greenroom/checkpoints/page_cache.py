"""What of a file the page cache holds."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes are there, so that a read of them need not go to the disk. It reads nothing.

    Also true where the system does not say. Raises ValueError if the file ends before.
    """
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = offset + nbytes - start
    pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    try:
        mapped = mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=start)
    except OSError:  # a file system without mappings
        return True
    with mapped:
        view = np.frombuffer(mapped, np.uint8)
        address = view.ctypes.data
        del view  # the mapping can not be closed under it
        refused = _LIBC.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)
        )  # fmt: skip
    return bool(refused or 2 * int((pages & 1).sum()) > len(pages))
