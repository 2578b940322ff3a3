"""Lets one process run at a time, by a lock on a file. The lock of a process that was killed is free again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.05
"""flock has no deadline, so it is polled."""


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float, poll_s: float = POLL_S) -> Iterator[bool]:
    """Hold the lock on ``path``, which is created if it is missing, and stays. Yields False: not got within ``wait_s``.

    Threads of one process exclude each other too. Raises OSError if the file can not be opened, or if its file system
    has no locks.
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
