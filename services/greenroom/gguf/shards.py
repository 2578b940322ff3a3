"""A model in one GGUF file, or in several that are named as one: ``NAME-00001-of-00003.gguf``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from greenroom.core.errors import CorruptCheckpoint
from greenroom.gguf.header import GgufHeader, GgufTensor, read_header
from greenroom.gguf.metadata import Metadata

SUFFIX: Final = ".gguf"
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_NAMED: Final = 5
"""Files of a folder in an error."""
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """``shards`` in their order. ``metadata`` is that of the first one, where all of it is."""

    shards: Sequence[Path]
    metadata: Metadata
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def path(self) -> Path:
        return self.shards[0]


def read_gguf(path: Path) -> GgufModel:
    """The model that ``path`` holds, or is any shard of. Raises CorruptCheckpoint, UnsupportedModel."""
    shards = shards_of(path)
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise CorruptCheckpoint(
            f"{path} lacks {len(missing)} of {len(shards)} shards, which have to be beside it: {', '.join(missing[:5])}"
        )
    headers = [read_header(shard) for shard in shards]
    for number, header in enumerate(headers):
        _check_place(header, number, len(shards))
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CorruptCheckpoint(f"{name} is both in {tensors[name].shard.name} and in {header.path.name}")
            tensors[name] = tensor
    metadata = headers[0].metadata
    expected = metadata.count(_TENSORS, len(tensors), least=0)
    if expected != len(tensors):
        raise CorruptCheckpoint(f"{_TENSORS} in {headers[0].path} is {expected}, and the shards have {len(tensors)}")
    return GgufModel(shards, metadata, tensors)


def shards_of(path: Path) -> list[Path]:
    """By their names alone; they may be missing. Raises CorruptCheckpoint for a name that contradicts itself."""
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return [path]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count:
        raise CorruptCheckpoint(f"{path} is named as shard {number} of {count}")
    return [path.with_name(f"{named['stem']}-{one:05}-of-{count:05}{SUFFIX}") for one in range(1, count + 1)]


def hint_of_files(folder: Path) -> str:
    """For an error about a folder that is no checkpoint: which of its GGUF files to name, of a model in several the
    first one. Empty: it has none."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    parts = [_SHARD.fullmatch(file.name) for file in files]
    models = [file for file, part in zip(files, parts, strict=True) if part is None or int(part["number"]) == 1]
    named = models or files[:1]
    if not named:
        return ""
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    which = "it" if len(named) == 1 else "one of them"
    return f"; to serve a GGUF file, name {which}: {', '.join(map(str, named[:_MOST_NAMED]))}{more}"


def _check_place(header: GgufHeader, number: int, count: int) -> None:
    said = header.metadata.count(_COUNT, 1, least=0) or 1  # older writers say 0 for one file
    if said != count:
        raise CorruptCheckpoint(
            f"{header.path} is named as one of {count} shards, and says that it is one of {said} ({_COUNT}): shards "
            f"are found by their names, NAME-00001-of-{said:05}{SUFFIX}"
        )
    own = header.metadata.count(_NUMBER, number, least=0)
    if own != number:
        raise CorruptCheckpoint(
            f"{header.path} says that it is shard {own + 1} ({_NUMBER}), by its name it is {number + 1}"
        )
