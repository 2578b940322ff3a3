"""Tensors of safetensors files.

They are read, not mapped, because touched pages of a mapped file count towards the process's memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor, unreadable
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def torch_dtype(tensor: StoredTensor) -> torch.dtype:
    """Raises UnsupportedModel for the formats of quantised weights."""
    if tensor.dtype not in _DTYPES:
        raise UnsupportedModel(f"{tensor.name} is stored as {tensor.dtype}; known: {', '.join(_DTYPES)}")
    return _DTYPES[tensor.dtype]


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
                raise unreadable(tensor.shard, error) from error
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
    return data.view(torch_dtype(tensor)).view(shape)
