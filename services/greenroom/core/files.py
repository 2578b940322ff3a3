"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from greenroom.core.errors import GreenroomError, InvalidConfig

PARTIAL = ".partial"
"""The suffix of files that are not whole yet. A crash may leave such a file."""

_LFS_POINTER = b"version https://git-lfs"
"""What a file begins with whose contents Git LFS has not fetched."""


class FileState(NamedTuple):
    """What tells a file from one that took its place, and from itself once it was written to."""

    size: int
    modified_ns: int

    @staticmethod
    def of(descriptor: int) -> FileState:
        """Of an open file. Raises OSError."""
        status = os.fstat(descriptor)
        return FileState(status.st_size, status.st_mtime_ns)


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


def lfs_hint(path: Path) -> str:
    """For an error about a file that is not what it should be: what to do if it is a pointer of Git LFS, as a clone
    without LFS has it. Empty: it is none. Raises OSError."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return ": it is a pointer of Git LFS in its place, so run `git lfs pull` in its folder" if is_pointer else ""


def check_new_folder(path: Path, field: str = "DIR") -> None:
    """Raises InvalidConfig, which names ``field``, unless ``path`` is free or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidConfig(field, str(path), "it exists and is not empty; name a new folder")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` to write into. It becomes ``path``, which is free or an empty folder, when the block has
    ended without an error, and is deleted otherwise.

    Raises GreenroomError for an OSError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
        try:
            yield draft
            draft.chmod(0o755)
            draft.replace(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise GreenroomError(f"could not write {path}: {error.strerror}; nothing was left behind") from error


def synchronise(path: Path) -> None:
    """Makes the file's contents, or the folder's names, survive a crash of the machine. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
