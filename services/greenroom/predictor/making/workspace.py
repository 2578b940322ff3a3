"""Folders for the files of jobs. The lock of one whose process was killed is free, which is how it is found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "greenroom-training-"
_TRIES = 10


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder, locked by this process and removed at the end. Blocks on the disk. Raises OSError."""
    folder, lock = _made()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> list[Path]:
    """Remove the folders of this user whose process is gone, and say which. Others' and those in use stay."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or (lock := _locked(folder)) is None:
                continue
            try:
                shutil.rmtree(folder)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed


def _made() -> tuple[Path, int]:
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):
            lock = _locked(folder)
            if lock is not None:
                if folder.exists():
                    return folder, lock
                os.close(lock)
        # Another process that starts just now took it for one that was left.
    raise FileExistsError(f"no folder for a training could be kept below {tempfile.gettempdir()}")


def _locked(folder: Path) -> int | None:
    """None: another has it. No child inherits it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
