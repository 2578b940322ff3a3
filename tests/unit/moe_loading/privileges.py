"""What an ordinary user may not do, for tests that run as root too: in containers most do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def permissions_count() -> Iterator[None]:
    """While it is open, this thread may read and write what the mode of a file lets its owner, root or not."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capget"):
        pytest.skip("root can not do without its privileges here")
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), ctypes.byref(sets)) == 0
    had = sets[0].effective
    sets[0].effective = had & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
    try:
        yield
    finally:
        sets[0].effective = had
        assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
