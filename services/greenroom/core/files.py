"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL = ".partial"
"""What the names end with of files that are not whole yet; one that nobody is writing was left by a crash."""


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Beside ``path`` and renamed: whoever reads it sees its former contents or these, and so does whoever finds it
    after a crash of this process.

    ``durable``: after a crash of the machine too, and once this has returned it is these. Raises OSError; then the
    former contents stay.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        synchronise(path.parent)


def synchronise(path: Path) -> None:
    """What was written to the file, or the names in the folder, outlast a crash of the machine. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
