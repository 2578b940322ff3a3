"""A file system that has no direct reads and writes."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file can be opened past the page cache."""
    original = os.open

    def refuse(file: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(file, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
