"""One process at a time, by a lock on a file that goes with its holder: a process that was killed blocks nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.05
"""flock can not be waited for with a deadline."""


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float, poll_s: float = POLL_S) -> Iterator[bool]:
    """Hold the lock on ``path``, which is made where it is not there and stays; False: not had within ``wait_s``.

    Threads of one process exclude each other too. Raises OSError where the file can not be opened, or its file system
    knows no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not (held := _try_lock(fd)) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(poll_s, left))
        yield held
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
