"""A file system of a few MiB, which can be filled to its last byte and freed again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BALLAST = "ballast"
_TIMEOUT_S = 30.0


class NotMountable(Exception):
    """This machine or user mounts nothing; the message says why."""


class SmallDisk:
    """Mounted at ``folder``, whose other files are whoever's it is for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Whoever writes next finds no space left. What becomes free meanwhile is taken too."""
        with (self.folder / _BALLAST).open("ab") as ballast:
            while left := self.free_bytes:
                try:
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, left)
                except OSError:  # another was quicker
                    continue

    def free(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """``size`` bytes of memory as a file system at ``folder``, which is made. Raises NotMountable."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        raise NotMountable("a small file system is mounted by root: run this test as root")
    folder.mkdir(parents=True)
    command = [mount, "-t", "tmpfs", "-o", f"size={size},mode=700", "greenroom-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise NotMountable(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=_TIMEOUT_S)
