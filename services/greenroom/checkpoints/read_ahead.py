"""Reads a checkpoint's tensors ahead of whoever takes them, in a known order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import ShardReader, room_for
from greenroom.core.units import MIB
from greenroom.experts.pack.direct_io import HUGE_PAGE_BYTES, page_aligned
from greenroom.experts.pack.layout import align

AHEAD_BYTES: Final = 24 * MIB
"""What a fast disk reads in the time in which an expert is converted."""

THREADS: Final = 3
"""Tensors that are with the disk at once."""

Wanted = tuple[StoredTensor, int | None]
"""A tensor, and the slice of it along the first dimension (None: all of it)."""


class ReadAhead:
    """The tensors ``wanted``, in that order; a context manager.

    Beside what was taken it holds ``ahead_bytes`` at most, or one tensor if that is larger. Memory is reused, since
    fresh pages cost as much as reading. A read that fails is told by the ``take`` whose tensor it is. Not thread-safe.
    """

    def __init__(self, reader: ShardReader, wanted: Iterable[Wanted], *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._reader = reader
        self._wanted = iter(wanted)
        self._ahead_bytes = ahead_bytes
        self._reads: deque[tuple[Future[torch.Tensor], memoryview]] = deque()
        self._ahead = 0  # bytes of their memory
        self._taken: deque[memoryview] = deque()
        self._free: dict[int, list[memoryview]] = {}  # by size
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read ahead")
        self._next = next(self._wanted, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the reads that are under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self) -> torch.Tensor:
        """The next tensor's bytes as uint8, valid until ``give_back``.

        Raises CorruptCheckpoint as ``ShardReader.read`` does, IndexError if all were taken.
        """
        self._read_on()
        read, buffer = self._reads.popleft()
        self._ahead -= len(buffer)
        self._taken.append(buffer)
        self._read_on()
        return read.result()

    def give_back(self, count: int | None = None) -> None:
        """The ``count`` tensors that were taken first are needed no longer. None: all that were taken."""
        for _ in range(len(self._taken) if count is None else count):
            buffer = self._taken.popleft()
            self._free.setdefault(len(buffer), []).append(buffer)
        self._read_on()

    def _read_on(self) -> None:
        while self._next is not None:
            tensor, part = self._next
            nbytes = _memory_of(room_for(tensor, part))
            if self._reads and self._ahead + nbytes > self._ahead_bytes:
                return
            buffer = self._buffer(nbytes)
            self._reads.append((self._pool.submit(self._reader.read_into, tensor, part, buffer), buffer))
            self._ahead += len(buffer)
            self._next = next(self._wanted, None)

    def _buffer(self, nbytes: int) -> memoryview:
        """One that was given back and has just this size. Else a new one, for which one of another size is let go."""
        size = nbytes if nbytes in self._free else next(iter(self._free), None)
        found = None if size is None else self._free[size].pop()
        if size is not None and not self._free[size]:
            del self._free[size]
        return found if found is not None and size == nbytes else page_aligned(nbytes)


def _memory_of(nbytes: int) -> int:
    """Whole huge pages, which a direct read fills with less work, are what a large buffer takes in any case."""
    return align(nbytes, HUGE_PAGE_BYTES) if nbytes >= HUGE_PAGE_BYTES else nbytes
