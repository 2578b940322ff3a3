"""Tensors of safetensors and GGUF files.

They are read, not mapped, because touched pages of a mapped file count towards the process's memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch

from greenroom.checkpoints.gguf_blocks import NotFinite, numbers_of
from greenroom.checkpoints.page_cache import is_cached
from greenroom.checkpoints.safetensors_headers import StoredTensor, unreadable
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.core.files import FileState
from greenroom.core.units import MIB
from greenroom.experts.pack.layout import PAGE_BYTES, align

_DIRECT_BYTES: Final = MIB
"""From this size on it pays to read a tensor past the page cache: its pages need not be found, filled and copied.
Smaller ones come with what the system reads ahead."""

_ALIGNMENT: Final = 8
"""Of tensors in memory: their largest item."""

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


_CODES = {"F8_E4M3": torch.uint8, "F8_E8M0": torch.uint8}
"""What is read as codes alone, by those who know what they mean."""


def torch_dtype(tensor: StoredTensor, *, codes: bool = False) -> torch.dtype:
    """Of the tensor as ``typed`` gives it. ``codes``: take quantised weights too, as they are. Raises UnsupportedModel
    for those that are not known."""
    if tensor.block is not None:
        return torch.uint8 if codes else torch.float32
    if codes and tensor.dtype in _CODES:
        return _CODES[tensor.dtype]
    if tensor.dtype not in _DTYPES:
        raise UnsupportedModel(f"{tensor.name} is stored as {tensor.dtype}; known: {', '.join(_DTYPES)}")
    return _DTYPES[tensor.dtype]


def place_of(tensor: StoredTensor, part: int | None) -> tuple[int, int]:
    """Offset and size in bytes, within the shard, of the tensor or of its slice along the first dimension."""
    if part is None:
        return tensor.offset, tensor.nbytes
    nbytes = tensor.nbytes // tensor.shape[0]
    return tensor.offset + part * nbytes, nbytes


def room_for(tensor: StoredTensor, part: int | None) -> int:
    """The bytes of all pages that it may lie in, wherever it begins."""
    _, nbytes = place_of(tensor, part)
    return align(nbytes, PAGE_BYTES) + PAGE_BYTES


class ShardReader:
    """Open shards of a checkpoint; a context manager. Reads are thread-safe.

    Its end raises CorruptCheckpoint, unless another error ends it, for a shard that is not the one any more whose
    header said where its tensors lie: what was read then is of other tensors.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._direct: dict[Path, int] = {}
        self._refused: set[Path] = set()  # by a file system without direct reads
        self._states: dict[Path, FileState | None] = {}  # by what the tensors say that were asked for
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = [*self._files.items(), *self._direct.items()]
        changed = [shard for shard, fd in opened if self._states[shard] not in (None, FileState.of(fd))]
        for _, fd in opened:
            os.close(fd)
        self._files.clear()
        self._direct.clear()
        self._states.clear()
        if changed and kind is None:
            raise CorruptCheckpoint(f"{changed[0]} was changed while it was read; start again")

    def read(self, tensor: StoredTensor, part: int | None = None) -> torch.Tensor:
        """The tensor's bytes, or those of its ``part``-th slice along the first dimension, as uint8.

        Raises CorruptCheckpoint if the file is too short or can not be read.
        """
        offset, nbytes = place_of(tensor, part)
        data = torch.empty(nbytes, dtype=torch.uint8)
        with self._told_of(tensor):
            _fill(self._file(tensor), data.numpy().data, offset)
        return data

    def read_into(self, tensor: StoredTensor, part: int | None, buffer: memoryview) -> torch.Tensor:
        """As ``read``, into the page-aligned ``buffer`` of ``room_for`` bytes.

        It goes past the page cache, unless the tensor is small or is there already, or the file system refuses.
        """
        offset, nbytes = place_of(tensor, part)
        skip = offset % PAGE_BYTES
        with self._told_of(tensor):
            if not self._read_direct(tensor, buffer, offset - skip, skip + nbytes):
                _fill(self._file(tensor), buffer[:nbytes], offset)
                skip = 0
        if skip % _ALIGNMENT:
            buffer[:nbytes], skip = buffer[skip : skip + nbytes], 0
        return torch.from_numpy(np.frombuffer(buffer, np.uint8)[skip : skip + nbytes])

    def _read_direct(self, tensor: StoredTensor, buffer: memoryview, start: int, nbytes: int) -> bool:
        """False: it is to be read through the page cache. Raises OSError, EOFError, ValueError."""
        if nbytes < _DIRECT_BYTES or is_cached(self._file(tensor), start, nbytes):
            return False
        try:
            if (fd := self._direct_file(tensor.shard)) is None:
                return False
            _fill_pages(fd, buffer, start, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with self._lock:
                self._refused.add(tensor.shard)
            return False
        return True

    @contextlib.contextmanager
    def _told_of(self, tensor: StoredTensor) -> Iterator[None]:
        """Errors name the tensor and its file, as CorruptCheckpoint. The reader's end does not tell of them again."""
        try:
            yield
        except (EOFError, ValueError):  # a mapping past the file's end is a ValueError
            self._states[tensor.shard] = None
            raise CorruptCheckpoint(
                f"{tensor.shard} ended within {tensor.name}: it was changed while it was read"
            ) from None
        except OSError as error:
            raise unreadable(tensor.shard, error) from error

    def _file(self, tensor: StoredTensor) -> int:
        shard = tensor.shard
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
                self._states[shard] = tensor.state
            return self._files[shard]

    def _direct_file(self, shard: Path) -> int | None:
        with self._lock:
            if shard in self._refused:
                return None
            if shard not in self._direct:
                self._direct[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            return self._direct[shard]


def _fill(fd: int, view: memoryview, offset: int) -> None:
    """Raises OSError, EOFError."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise EOFError
        view, offset = view[count:], offset + count


def _fill_pages(fd: int, buffer: memoryview, offset: int, enough: int) -> None:
    """Read whole pages until there are ``enough`` bytes: the last page may lie past the file's end.

    Raises OSError, EOFError.
    """
    done, whole = 0, align(enough, PAGE_BYTES)
    while done < enough:
        count = os.preadv(fd, [buffer[done:whole]], offset + done)
        done += count
        if done < enough and (count == 0 or done % PAGE_BYTES):
            raise EOFError


def typed(
    data: torch.Tensor,
    tensor: StoredTensor,
    part: int | None = None,
    *,
    codes: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``data`` of ``ShardReader.read`` in its dtype and shape. A slice keeps a first dimension of 1.

    ``codes``: see ``torch_dtype``; GGUF's blocks then have the bytes of a row last. ``dtype``: what floating numbers
    are rounded to, in place of their own. Raises CorruptCheckpoint for blocks that mean no numbers.
    """
    shape = stored_shape(tensor, codes=codes) if part is None else (1, *stored_shape(tensor, codes=codes)[1:])
    if tensor.block is not None and not codes:
        try:
            return numbers_of(data, tensor.block, dtype or torch.float32).view(shape)
        except NotFinite as error:
            where = tensor.name if part is None else f"expert {part} of {tensor.name}"
            raise CorruptCheckpoint(f"{where} in {tensor.shard} {error}") from error
    found = data.view(torch_dtype(tensor, codes=codes)).view(shape)
    return found if dtype is None or not found.is_floating_point() else found.to(dtype)


def stored_shape(tensor: StoredTensor, *, codes: bool) -> tuple[int, ...]:
    """As ``typed`` gives it."""
    if tensor.block is None or not codes:
        return tensor.shape
    return *tensor.shape[:-1], tensor.shape[-1] // tensor.block.numbers * tensor.block.nbytes
