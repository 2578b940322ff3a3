"""What is fitted, made once and kept in the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from benchmarks.harness.machine import cache_folder
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig

F = TypeVar("F", bound=ArtifactFile)


@dataclass(frozen=True, slots=True)
class Kept:
    """``folder``: where the files are."""

    folder: Path

    @classmethod
    def usual(cls) -> Kept:
        return cls(cache_folder() / "bench-duoserve")

    def get(
        self, file: type[F], digest: str, options: object, makers: tuple[ModuleType, ...], make: Callable[[], F]
    ) -> F:
        """The file that was made of the same routing (``digest``) with the same ``options`` by the same ``makers``;
        made now where there is none, or none that can be read."""
        found = hashlib.sha256(f"{digest} {options!r}".encode())
        for module in makers:
            found.update(Path(str(module.__file__)).read_bytes())
        path = self.folder / f"{file.KIND}-{found.hexdigest()[:16]}.safetensors"
        if path.exists():
            with suppress(InvalidConfig):
                return file.read(path)
        made = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        made.write(path)
        return made
