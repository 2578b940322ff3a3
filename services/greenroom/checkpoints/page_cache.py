"""What of a file the page cache holds."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes are there, so that a read of them does not go to the disk. It reads nothing.

    ``offset``: a multiple of the page's size. Also true where the system does not say. Raises OSError, and ValueError
    where the file ends before.
    """
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ, offset=offset) as mapped:
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address = view.ctypes.data
        del view  # the mapping can not be closed under it
        answer = _LIBC.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
        )  # fmt: skip
    return bool(answer != 0 or 2 * int((pages & 1).sum()) > len(pages))
