"""The folder that a profile is written to: whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import PROFILE_FILE

KEYWORDS_FILE: Final = "keywords.json"
ROUTING_FILE: Final = "routing.npz"
OBSERVATIONS_FILE: Final = "observations.json"


def check_folder(folder: Path) -> None:
    """Raises InvalidConfig where ``folder`` is something else than a profile, or can not be made."""
    if folder.is_dir():
        own = ((folder / name).is_file() for name in (PROFILE_FILE, OBSERVATIONS_FILE))
        if any(folder.iterdir()) and not any(own):
            raise InvalidConfig("output", str(folder), "a folder that is new, empty, or of an earlier profile")
    elif folder.exists():
        raise InvalidConfig("output", str(folder), "a folder, not a file")
    if not folder.absolute().parent.is_dir():
        raise InvalidConfig("output", str(folder), "a folder within one that exists")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A copy of ``folder`` to write to. It takes the folder's place once all went well; else nothing changes."""
    check_folder(folder)
    folder = folder.absolute()
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, old = beside / "new", beside / "old"
    try:
        if folder.is_dir():
            shutil.copytree(folder, new)
        else:
            new.mkdir()
        yield new
        if folder.is_dir():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.is_dir():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
