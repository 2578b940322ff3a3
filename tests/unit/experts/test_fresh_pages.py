"""Fresh memory is taken ahead of what fills it, and what has been written meanwhile stays."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from greenroom.experts.copying import fresh_pages
from greenroom.experts.copying.fresh_pages import FreshPages
from greenroom.experts.pack.direct_io import HUGE_PAGE_BYTES, page_aligned
from greenroom.experts.pack.layout import PAGE_BYTES

NBYTES = 5 * HUGE_PAGE_BYTES + 3 * PAGE_BYTES


def there(region: memoryview) -> int:
    """Pages of the region that take memory."""
    pages = (ctypes.c_ubyte * (len(region) // PAGE_BYTES))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(region)), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_page_is_taken_and_no_byte_changes(threads: int) -> None:
    region = page_aligned(NBYTES)
    bytes_ = np.frombuffer(region, dtype=np.uint8)
    bytes_[:: PAGE_BYTES * 7] = 9
    pages = FreshPages(region, threads)
    assert pages.wait(20.0)
    assert there(region) == NBYTES // PAGE_BYTES
    assert (bytes_[:: PAGE_BYTES * 7] == 9).all()
    assert bytes_.sum(dtype=np.int64) == 9 * len(bytes_[:: PAGE_BYTES * 7])
    pages.close()


def test_closing_ends_it_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    region = page_aligned(NBYTES)
    pages = FreshPages(region, 1)
    monkeypatch.setattr(pages, "wait", lambda timeout_s: timeout_s is not None)
    pages.close()
    pages._run()
    assert there(region) == 0


def test_a_kernel_that_can_not_leaves_it_to_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_pages, "_POPULATE_WRITE", 12345)
    region = page_aligned(NBYTES)
    pages = FreshPages(region, 1)
    assert pages.wait(20.0)
    assert there(region) == 0
    pages.close()
