"""Writes go on behind the caller's back, in little memory, and none is lost without a word."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.experts.pack import chunk_writer
from greenroom.experts.pack.chunk_writer import THREADS, ChunkWriter
from tests.no_direct_io import refuse_direct_io

CHUNK = 8192
LENGTHS = (1, 4095, 3 * CHUNK, 0, 4096, CHUNK, 5, 2 * CHUNK - 5)
"""A multiple of 4 KiB together."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


@pytest.fixture
def writer(path: Path) -> Iterator[ChunkWriter]:
    fd = os.open(path, os.O_RDWR)
    writer = ChunkWriter(path, fd, chunk_bytes=CHUNK)
    yield writer
    writer.close()
    os.close(fd)


def drawn(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)


def write_all(writer: ChunkWriter) -> bytes:
    """Pieces of all lengths, then others behind a hole. Returns what the file is to hold."""
    written = b""
    for start in (0, 32 * CHUNK):
        writer.seek(start)
        written = written.ljust(start, b"\0")
        for length in LENGTHS:
            writer.append(drawn(length))
            written += drawn(length).tobytes()
    writer.flush()
    return written


def test_bytes_come_where_they_belong(writer: ChunkWriter, path: Path) -> None:
    assert write_all(writer) == path.read_bytes()


def test_a_file_system_that_opens_no_file_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct_io(monkeypatch)
    fd = os.open(path, os.O_RDWR)
    writer = ChunkWriter(path, fd, chunk_bytes=CHUNK)
    assert write_all(writer) == path.read_bytes()
    writer.close()
    os.close(fd)


def test_a_file_system_that_opens_it_and_refuses_the_write(
    writer: ChunkWriter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = os.pwrite, []

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if fd == writer._direct_fd:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    assert write_all(writer) == path.read_bytes()
    assert refused or writer._direct_fd is None


def test_a_short_write_goes_on_where_it_ended(writer: ChunkWriter, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: original(fd, data[: max(1, len(data) // 2)], offset))
    assert write_all(writer) == path.read_bytes()


def test_memory_does_not_grow_with_the_file(writer: ChunkWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    original, places = os.pwrite, set()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        places.add(np.frombuffer(data, np.uint8).ctypes.data)
        return original(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for _ in range(100):
        writer.append(drawn(CHUNK))
    writer.flush()
    assert len(places) <= THREADS + 2, "those with the disk, the one that is filled, and one between"


def fails_at(offset: int) -> Callable[[int, memoryview, int], int]:
    original = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        if at == offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, data, at)

    return pwrite


def test_a_failed_write_is_told_and_stays_told(writer: ChunkWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", fails_at(CHUNK))

    def write_many() -> None:
        for _ in range(20):
            writer.append(drawn(CHUNK))

    for call in (write_many, write_many, writer.flush, lambda: writer.seek(0), writer.flush):
        with pytest.raises(OSError, match="Input/output error"):
            call()


def test_the_disk_syncs_while_more_is_written(writer: ChunkWriter, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_writer, "SYNC_BYTES", 4 * CHUNK)
    original, begun, go_on = os.fdatasync, threading.Event(), threading.Event()

    def fdatasync(fd: int) -> None:
        begun.set()
        assert go_on.wait(60)
        original(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    written = drawn(20 * CHUNK)
    writer.append(written)
    assert begun.wait(60), "all was taken, though no sync has ended"
    go_on.set()
    writer.flush()
    assert path.read_bytes() == written.tobytes()


def test_a_failed_sync_is_told_and_stays_told(writer: ChunkWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells it once: the sync at the end would be told that all is well."""
    monkeypatch.setattr(chunk_writer, "SYNC_BYTES", 4 * CHUNK)
    told = []

    def fdatasync(fd: int) -> None:
        told.append(fd)
        if len(told) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    def write_and_flush() -> None:
        for _ in range(20):
            writer.append(drawn(CHUNK))
        writer.flush()

    for call in (write_and_flush, writer.flush, write_and_flush):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    assert len(told) == 1


def test_closing_waits_for_what_is_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the file would be closed, and another opened under its number, while it is written."""
    original, begun, ended = os.pwrite, [], []
    under_way, go_on = threading.Event(), threading.Event()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        begun.append(offset)
        under_way.set()
        assert go_on.wait(60)
        count = original(fd, data, offset)
        ended.append(offset)
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    fd = os.open(path, os.O_RDWR)
    writer = ChunkWriter(path, fd, chunk_bytes=CHUNK)
    for _ in range(3):
        writer.append(drawn(CHUNK))
    assert under_way.wait(60)
    closing = threading.Thread(target=writer.close)
    closing.start()
    assert not ended
    go_on.set()
    closing.join(60)
    os.close(fd)
    assert ended
    assert sorted(ended) == sorted(begun)
