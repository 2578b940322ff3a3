"""Tensors that are read ahead are those that were asked for, in order, and in little memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.checkpoints.page_cache import is_cached
from greenroom.checkpoints.read_ahead import ReadAhead, Wanted
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import ShardReader, room_for
from greenroom.core.errors import CorruptCheckpoint
from greenroom.core.units import MIB
from tests.no_direct_io import refuse_direct_io

LARGE = 2 * MIB
"""Tensors of this size are read past the page cache."""


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Random bytes, not in the page cache where its file system has one. It ends within a page."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(4 * LARGE + 77))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def of_bytes(shard: Path, offset: int, *shape: int) -> StoredTensor:
    return StoredTensor(f"at {offset}", shard, "U8", shape, offset, int(np.prod(shape)))


def wanted_of(shard: Path) -> list[Wanted]:
    """Large and small, on a page, on an item and on neither, whole and as slices; the last ends with the file."""
    stacked = of_bytes(shard, 4096 + 8, 3, LARGE // 2 + 3)
    return [
        (of_bytes(shard, 0, LARGE), None),
        (of_bytes(shard, 0, 0), None),
        (of_bytes(shard, 16, LARGE), None),
        (of_bytes(shard, 3, 5), None),
        (of_bytes(shard, 5, LARGE), None),
        *((stacked, part) for part in (2, 0, 1)),
        (of_bytes(shard, 3 * LARGE + 77, LARGE), None),
    ]


def test_they_are_what_was_asked_for(shard: Path) -> None:
    wanted = wanted_of(shard)
    with ShardReader() as reader, ReadAhead(reader, wanted) as ahead:
        found = []
        for _ in wanted:
            data = ahead.take()
            assert data.data_ptr() % 8 == 0, "a tensor of any dtype may lie there"
            found.append(data.clone())
            ahead.give_back()
        with pytest.raises(IndexError):
            ahead.take()
    content = shard.read_bytes()
    for data, (tensor, part) in zip(found, wanted, strict=True):
        nbytes = data.numel()
        offset = tensor.offset + (part or 0) * nbytes
        assert data.numpy().tobytes() == content[offset : offset + nbytes], (tensor, part)


def test_a_file_system_without_direct_reads(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct_io(monkeypatch)
    test_they_are_what_was_asked_for(shard)


def test_what_is_in_the_page_cache_is_read_from_there(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.read_bytes()
    with shard.open("rb") as file:
        assert is_cached(file.fileno(), 4096, LARGE)
    monkeypatch.setattr(ShardReader, "_direct_file", lambda *_: pytest.fail("the disk was asked"))
    test_they_are_what_was_asked_for(shard)


def test_a_file_system_without_mappings(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with ShardReader() as reader:
        data = reader.read_into(of_bytes(shard, 4096, LARGE), None, memoryview(bytearray(LARGE + 8192)))
    assert data.numpy().tobytes() == shard.read_bytes()[4096 : 4096 + LARGE]


def test_what_is_not_in_the_page_cache_does_not_come_there(shard: Path) -> None:
    with shard.open("rb") as file:
        if is_cached(file.fileno(), 0, LARGE):
            pytest.skip("a file system in memory")
        with ShardReader() as reader, ReadAhead(reader, [(of_bytes(shard, 0, LARGE), None)]) as ahead:
            ahead.take()
        assert not is_cached(file.fileno(), 0, LARGE)


def test_a_file_that_ended_is_told_for_the_tensor_that_it_cuts(shard: Path) -> None:
    wanted: list[Wanted] = [(of_bytes(shard, number * LARGE, LARGE), None) for number in range(4)]
    os.truncate(shard, 2 * LARGE + 5000)
    with ShardReader() as reader, ReadAhead(reader, wanted, ahead_bytes=8 * LARGE) as ahead:
        ahead.take()
        ahead.take()
        for number in (2, 3):
            with pytest.raises(CorruptCheckpoint, match=f"model.safetensors ended within at {number * LARGE}: it was"):
                ahead.take()


def test_a_disk_that_fails_is_told_with_the_file(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with (
        ShardReader() as reader,
        ReadAhead(reader, wanted_of(shard)[:1]) as ahead,
        pytest.raises(CorruptCheckpoint, match=r"model.safetensors can not be read: Input/output error"),
    ):
        ahead.take()


class CountingReader(ShardReader):
    """Gives tensors of their number. ``begun``: the reads that were asked for; ``places``: the memory they had."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.places: set[int] = set()
        self._count = threading.Lock()

    def read_into(self, tensor: StoredTensor, part: int | None, buffer: memoryview) -> torch.Tensor:
        with self._count:
            self.begun += 1
            self.places.add(np.frombuffer(buffer, np.uint8).ctypes.data)
        data = torch.from_numpy(np.frombuffer(buffer, np.uint8)[: tensor.nbytes])
        return data.fill_(part or 0)


def test_memory_does_not_grow_with_the_checkpoint(shard: Path) -> None:
    stacked = of_bytes(shard, 0, 200, 10_000)
    room = room_for(stacked, 0)
    with (
        CountingReader() as reader,
        ReadAhead(reader, [(stacked, part) for part in range(200)], ahead_bytes=5 * room) as ahead,
    ):
        for part in range(0, 200, 2):
            pair = [ahead.take(), ahead.take()]
            assert [set(data.numpy().tolist()) for data in pair] == [{part}, {part + 1}]
            assert reader.begun <= part + 2 + 5
            ahead.give_back()
    assert reader.begun == 200
    assert len(reader.places) <= 2 + 5


def test_what_was_taken_first_is_given_back_first(shard: Path) -> None:
    """The memory of what is still needed is not written to."""
    stacked = of_bytes(shard, 0, 40, 10_000)
    with (
        CountingReader() as reader,
        ReadAhead(reader, [(stacked, part) for part in range(40)], ahead_bytes=2 * room_for(stacked, 0)) as ahead,
    ):
        kept = [ahead.take()]
        for part in range(1, 40):
            kept.append(ahead.take())
            assert [set(data.numpy().tolist()) for data in kept] == [{part - 1}, {part}]
            kept.pop(0)
            ahead.give_back(1)
    assert len(reader.places) <= 2 + 2


def test_a_tensor_beyond_the_limit_is_read_alone(shard: Path) -> None:
    stacked = of_bytes(shard, 0, 3, 10_000)
    with (
        CountingReader() as reader,
        ReadAhead(reader, [(stacked, part) for part in range(3)], ahead_bytes=4096) as ahead,
    ):
        for part in range(3):
            assert set(ahead.take().numpy().tolist()) == {part}
            assert reader.begun <= part + 2
            ahead.give_back()


def test_memory_of_another_size_makes_room(shard: Path) -> None:
    """Layers of two sizes would else keep the memory of both."""
    wanted: list[Wanted] = [(of_bytes(shard, 0, size), None) for size in (10_000, 30_000, 10_000, 30_000)]
    with CountingReader() as reader, ReadAhead(reader, wanted, ahead_bytes=4096) as ahead:
        for _ in wanted:
            ahead.take()
            ahead.give_back()
            assert sum(map(len, ahead._free.values())) <= 2
