"""Safetensors files: their contents from the headers alone, and their tensors.

Format: the header's length (8 bytes, little-endian), the header as JSON (name to dtype, shape and offsets), the data.
Files are read, not mapped, because touched pages of a mapped file count towards the process's memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: the place and the type of its bytes."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises UnsupportedModel for the formats of quantised weights."""
        if self.dtype not in _DTYPES:
            raise UnsupportedModel(f"{self.name} is stored as {self.dtype}; known: {', '.join(_DTYPES)}")
        return _DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises CorruptCheckpoint if it is missing, truncated, malformed or unreadable."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CorruptCheckpoint(f"{shard} is truncated within its header, or is no safetensors file")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{shard} is missing") from None
    except OSError as error:
        raise _unreadable(shard, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"the header of {shard} can not be read: {error}") from error
    data = 8 + length
    tensors = {name: _stored(shard, name, entry, data) for name, entry in entries.items()}
    _check_contiguous(shard, tensors, data)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=data)
    if end != size:
        raise CorruptCheckpoint(
            f"{shard} has {size} bytes where its header says {end}: it was truncated or not fully downloaded"
        )
    return tensors


def _check_contiguous(shard: Path, tensors: dict[str, StoredTensor], data: int) -> None:
    """Checks that every byte of the data belongs to exactly one tensor, as the format demands."""
    end, before = data, ""
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
        if tensor.offset < end:
            raise CorruptCheckpoint(f"the header of {shard} has {before} and {tensor.name} overlap: they share bytes")
        if tensor.offset > end:
            raise CorruptCheckpoint(
                f"the header of {shard} leaves {tensor.offset - end} bytes before {tensor.name} out"
            )
        end, before = tensor.offset + tensor.nbytes, tensor.name


def _unreadable(shard: Path, error: OSError) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{shard} can not be read: {error.strerror or error}")


def _stored(shard: Path, name: str, entry: _Entry, data: int) -> StoredTensor:
    begin, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if not 0 <= begin <= end or (dtype is not None and end - begin != math.prod(entry.shape) * dtype.itemsize):
        raise CorruptCheckpoint(f"the header of {shard} contradicts itself about {name}")
    return StoredTensor(name, shard, entry.dtype, tuple(entry.shape), data + begin, end - begin)


class ShardReader:
    """Open shards of a checkpoint; a context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def read(self, tensor: StoredTensor, part: int | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor's bytes, or those of its ``part``-th slice along the first dimension, as uint8.

        They are read into ``into`` if that has exactly their size, so the system need not clear new memory for each
        read. Raises CorruptCheckpoint if the file is too short or can not be read.
        """
        nbytes = tensor.nbytes if part is None else tensor.nbytes // tensor.shape[0]
        offset = tensor.offset + (0 if part is None else part * nbytes)
        data = into if into is not None and into.numel() == nbytes else torch.empty(nbytes, dtype=torch.uint8)
        view = data.numpy().data
        while view:
            try:
                count = os.preadv(self._file(tensor.shard), [view], offset)
            except OSError as error:
                raise _unreadable(tensor.shard, error) from error
            if count == 0:
                raise CorruptCheckpoint(f"{tensor.shard} ended within {tensor.name}: it was changed while it was read")
            view, offset = view[count:], offset + count
        return data

    def _file(self, shard: Path) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]


def typed(data: torch.Tensor, tensor: StoredTensor, part: int | None = None) -> torch.Tensor:
    """``data`` of ``ShardReader.read`` in its dtype and shape. A slice keeps a first dimension of 1."""
    shape = tensor.shape if part is None else (1, *tensor.shape[1:])
    return data.view(tensor.torch_dtype).view(shape)


def merge_headers(shards: Mapping[Path, dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint. Raises CorruptCheckpoint if two files hold the same one."""
    merged: dict[str, StoredTensor] = {}
    for shard, tensors in shards.items():
        for name, tensor in tensors.items():
            if name in merged:
                raise CorruptCheckpoint(f"{name} is both in {merged[name].shard.name} and in {shard.name}")
            merged[name] = tensor
    return merged
