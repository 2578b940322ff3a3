"""The header of one GGUF file: its metadata, and where its tensors lie.

Format (github.com/ggml-org/ggml/blob/master/docs/gguf.md): ``GGUF``, version, the numbers of tensors and of metadata;
the metadata (key, type, value); the tensors (name, shape, type, offset); then, aligned, the data.

A file may come from anywhere. So nothing is allocated that the file does not have the bytes for, and nothing is mapped:
every count, length and offset is compared with the file's size before it is used. Hence a reader of our own: that of
the ``gguf`` package maps the file and trusts its counts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.core.files import FileState, lfs_hint
from greenroom.core.units import MIB
from greenroom.gguf.block_types import TYPES, BlockType
from greenroom.gguf.metadata import Metadata

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 128 * MIB
"""The largest vocabularies with their merges take about 20 MiB."""
_AT_ONCE: Final = MIB
_MAX_DIMENSIONS: Final = 4  # ggml's
_ALIGNMENT: Final = 32  # where the metadata says none
_MAX_ALIGNMENT: Final = MIB

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _BOOL, _TEXT, _ARRAY = 6, 7, 8, 9
_LEAST_PAIR: Final = 8 + 4 + 1
_LEAST_TENSOR: Final = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place and the type of a tensor's numbers. ``shape``: the last dimension is the one that is contiguous, as in
    torch; in the file it is the first. ``state``: of the shard, when its header was read."""

    name: str
    shard: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    state: FileState | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises CorruptCheckpoint, with what is wrong where, for a file that is missing, truncated, malformed or
    unreadable; UnsupportedModel for versions and types that are not known."""
    try:
        with path.open("rb") as file:
            return _read(path, file, FileState.of(file.fileno()))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} can not be read: {error.strerror or error}") from error


def _read(path: Path, file: BinaryIO, state: FileState) -> GgufHeader:
    size = state.size
    reader = _Reader(path, file, size)
    if reader.bytes(4) != MAGIC:
        raise CorruptCheckpoint(f"{path} is no GGUF file: it does not begin with GGUF{lfs_hint(path)}")
    version = reader.scalar("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "for big-endian machines" if swapped in _VERSIONS else f"of version {version}"
        raise UnsupportedModel(f"{path} is a GGUF file {kind}; versions 2 and 3, little-endian, are read")
    tensor_count, pair_count = reader.count(_LEAST_TENSOR, "tensors"), reader.count(_LEAST_PAIR, "keys")
    values: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.text("a key")
        if key in values:
            raise CorruptCheckpoint(f"{path} has {key} twice")
        values[key] = reader.value(reader.scalar("I"), key)
    metadata = Metadata(path, values)
    alignment = metadata.count("general.alignment", _ALIGNMENT)
    if alignment % 8 or alignment & (alignment - 1) or alignment > _MAX_ALIGNMENT:
        raise metadata.wrong("general.alignment", f"a power of two from 8 to {_MAX_ALIGNMENT}")
    found = [_tensor(path, reader) for _ in range(tensor_count)]
    data = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = data
    for name, stored_as, shape, offset in found:
        if name in tensors:
            raise CorruptCheckpoint(f"{path} has {name} twice")
        nbytes = math.prod(shape) // stored_as.numbers * stored_as.nbytes
        if data + offset != end:
            raise CorruptCheckpoint(
                f"{name} in {path} begins at byte {data + offset}, and should at {end}, where the tensor before it ends"
            )
        if end + nbytes > size:
            raise CorruptCheckpoint(
                f"{path} ends within {name}: it has {size} bytes and needs {end + nbytes}, so it was truncated or not "
                "fully downloaded"
            )
        tensors[name] = GgufTensor(name, path, stored_as, shape, end, nbytes, state)
        end += -(-nbytes // alignment) * alignment
    return GgufHeader(path, metadata, tensors)


def _tensor(path: Path, reader: _Reader) -> tuple[str, BlockType, tuple[int, ...], int]:
    name = reader.text("a tensor's name")
    dimensions = reader.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise CorruptCheckpoint(f"{name} in {path} has {dimensions} dimensions, and {_MAX_DIMENSIONS} are the most")
    sizes = tuple(reader.scalar("Q") for _ in range(dimensions))
    number, offset = reader.scalar("I"), reader.scalar("Q")
    if number not in TYPES:
        raise UnsupportedModel(
            f"{name} in {path} is stored as type {number}, which is not known here; known: "
            f"{', '.join(kind.name for kind in TYPES.values())}"
        )
    kind = TYPES[number]
    if not all(sizes) or math.prod(sizes) > _MOST_NUMBERS:
        raise CorruptCheckpoint(f"{name} in {path} has the shape {sizes[::-1]}, which no tensor has")
    if (sizes[0] if sizes else 1) % kind.numbers:
        raise CorruptCheckpoint(
            f"{name} in {path} has rows of {sizes[0] if sizes else 1} numbers as {kind.name}, which has blocks of "
            f"{kind.numbers}"
        )
    return name, kind, sizes[::-1], offset


_MOST_NUMBERS: Final = 2**48


class _Reader:
    """Reads a header forward. Whatever it would read past the file's end is refused before it is read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.at = 0
        self._path = path
        self._file = file
        self._size = size
        self._limit = min(size, _MAX_HEADER_BYTES)
        self._read = bytearray()

    def bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._read):
            self._read_to(end)
        found = bytes(self._read[self.at : end])
        self.at = end
        return found

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))
        return value

    def count(self, least_bytes: int, of: str) -> int:
        """How many follow, each of ``least_bytes`` or more."""
        count = int(self.scalar("Q"))
        if count * least_bytes > self._limit - self.at:
            raise CorruptCheckpoint(
                f"{self._path} should have {count} {of}, and has {self._size} bytes in all: it is truncated within its "
                "header, or is damaged"
            )
        return count

    def text(self, what: str) -> str:
        data = self.bytes(self.count(1, f"bytes of {what}"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{self._path}: {what} is no valid UTF-8: {data[:40]!r}") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise CorruptCheckpoint(f"{key} in {self._path} is of type {kind}, which GGUF does not have")
        return self._converted(kind, self.scalar(_SCALARS[kind]), key)

    def _array(self, key: str) -> list[Any]:
        kind = self.scalar("I")
        if kind == _TEXT:
            return [self.text(key) for _ in range(self.count(8, f"texts in {key}"))]
        if kind not in _SCALARS:
            raise CorruptCheckpoint(f"{key} in {self._path} is a list of type {kind}, which GGUF does not have")
        code = _SCALARS[kind]
        count = self.count(struct.calcsize(f"<{code}"), f"numbers in {key}")
        values = np.frombuffer(self.bytes(count * struct.calcsize(f"<{code}")), np.dtype(code).newbyteorder("<"))
        return [self._converted(kind, value, key) for value in values.tolist()] if kind == _BOOL else values.tolist()

    def _converted(self, kind: int, value: Any, key: str) -> Any:
        if kind == _BOOL:
            if value > 1:
                raise CorruptCheckpoint(f"{key} in {self._path} is {value}, and should be true (1) or false (0)")
            return bool(value)
        # The shortest number that this one is in float32: 1e-06, not 9.999999974752427e-07.
        return float(str(np.float32(value))) if kind == _FLOAT else value

    def _read_to(self, end: int) -> None:
        if end > self._limit:
            raise CorruptCheckpoint(
                f"{self._path} is truncated within its header"
                if end > self._size
                else f"the header of {self._path} has more than {_MAX_HEADER_BYTES // MIB} MiB"
            )
        wanted = min(self._limit, max(end, len(self._read) + _AT_ONCE)) - len(self._read)
        data = self._file.read(wanted)
        if len(data) < wanted:
            raise CorruptCheckpoint(f"{self._path} ended within its header: it was changed while it was read")
        self._read += data
