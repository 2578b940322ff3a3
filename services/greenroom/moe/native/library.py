"""The compiled library of this installation."""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from greenroom.core.errors import GreenroomError


class NativeUnavailable(GreenroomError):
    """The compiled products are not available here. The message says why."""


@functools.cache
def native_library() -> ctypes.CDLL:
    """Raises NativeUnavailable, with the reason."""
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_rows{suffix}"
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise NativeUnavailable(f"{path.name} can not be loaded: {error}") from error
    raise NativeUnavailable("greenroom was installed without a C++ compiler: install one and greenroom again")
