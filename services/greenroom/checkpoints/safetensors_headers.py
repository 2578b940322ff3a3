"""What safetensors files hold, from their headers alone. Without torch.

Format: the header's length (8 bytes, little-endian), the header as JSON (name to dtype, shape and offsets), the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from greenroom.core.errors import CorruptCheckpoint
from greenroom.core.files import FileState, lfs_hint
from greenroom.gguf.block_types import BlockType

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ITEM_BYTES = _FLOATS | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E8M0": 1}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: the place and the type of its bytes. ``block``: of GGUF, whose codes mean the
    tensor's numbers; ``dtype`` is then its name. ``state``: of the shard, when its header was read."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    block: BlockType | None = None
    state: FileState | None = field(default=None, repr=False)

    @property
    def is_float(self) -> bool:
        """Whether it is numbers with fractions, or codes that mean such."""
        return self.block is not None or self.dtype in _FLOATS


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises CorruptCheckpoint if it is missing, truncated, malformed or unreadable."""
    try:
        with shard.open("rb") as file:
            state = FileState.of(file.fileno())
            size = state.size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CorruptCheckpoint(
                    f"{shard} is truncated within its header, or is no safetensors file{lfs_hint(shard)}"
                )
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{shard} is missing") from None
    except OSError as error:
        raise unreadable(shard, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"the header of {shard} can not be read: {error}") from error
    data = 8 + length
    tensors = {name: _stored(shard, name, entry, data, state) for name, entry in entries.items()}
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


def unreadable(path: Path, error: OSError) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} can not be read: {error.strerror or error}")


def _stored(shard: Path, name: str, entry: _Entry, data: int, state: FileState) -> StoredTensor:
    begin, end = entry.data_offsets
    item_bytes = _ITEM_BYTES.get(entry.dtype)
    is_shape = min(entry.shape, default=0) >= 0
    nbytes = end - begin if item_bytes is None else math.prod(entry.shape) * item_bytes
    if not (0 <= begin <= end and is_shape and end - begin == nbytes):
        raise CorruptCheckpoint(f"the header of {shard} contradicts itself about {name}")
    return StoredTensor(name, shard, entry.dtype, tuple(entry.shape), data + begin, end - begin, state=state)


def merge_headers(shards: Mapping[Path, dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint. Raises CorruptCheckpoint if two files hold the same one."""
    merged: dict[str, StoredTensor] = {}
    for shard, tensors in shards.items():
        for name, tensor in tensors.items():
            if name in merged:
                raise CorruptCheckpoint(f"{name} is both in {merged[name].shard.name} and in {shard.name}")
            merged[name] = tensor
    return merged
