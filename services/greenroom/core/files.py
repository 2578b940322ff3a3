"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL = ".partial"
"""The suffix of files that are not whole yet. A crash may leave such a file."""


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes beside ``path`` and renames: a reader sees the former contents or these, also after a crash of this
    process.

    ``durable``: also after a crash of the machine; once this has returned a reader sees these. Raises OSError; then the
    former contents stay.
    """
    # No hidden file: beside a pack, those that nobody has locked are swept away as the leftovers of dead writers.
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
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
    """Makes the file's contents, or the folder's names, survive a crash of the machine. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
