"""The file that an extractor goes by: one of one's own, or the one that comes with greenroom."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from greenroom.core.errors import InvalidConfig


def read_extractor_file(path: Path | None, kind: str, shipped: tuple[str, str], most_bytes: int) -> tuple[bytes, str]:
    """Its bytes, and what messages call it. ``path`` None: the ``shipped`` (package, file). ``kind``: what it holds, in
    the plural. Raises InvalidConfig for one that can not be read or has more than ``most_bytes``.
    """
    if path is None:
        package, name = shipped
        return (resources.files(package) / name).read_bytes(), f"the shipped {kind}"
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise InvalidConfig(kind, str(path), f"it has {size} bytes, and may have {most_bytes}")
        return path.read_bytes(), str(path)
    except OSError as error:
        raise InvalidConfig(kind, str(path), f"it must be a file that can be read: {error.strerror}") from error
