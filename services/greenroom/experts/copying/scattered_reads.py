"""Reads of whole models, whose records go into several pieces of memory each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.experts.copying.mover import Job
from greenroom.experts.copying.transfers import RecordReads
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import PackManifest


class ScatteredStore(Protocol):
    """A pack of whole models, one a layer, or a test's stand-in. Several threads read it at once."""

    @property
    def manifest(self) -> PackManifest: ...

    def read_pieces(self, layer: int, expert: int, start: int, pieces: Sequence[memoryview]) -> None:
        """Fill page-aligned ``pieces`` of whole pages with the record's bytes from ``start``. Raises OSError."""
        ...

    def is_checked(self, layer: int, expert: int) -> bool:
        """Whether the record is known to be what was stored, so that checking it again takes no time."""
        ...

    def check_pieces(self, layer: int, expert: int, pieces: Sequence[memoryview]) -> None:
        """Raises PackError if the record in ``pieces`` is not what was stored."""
        ...


@dataclass(slots=True)
class ScatteredJob(Job):
    """``pieces``: of the record, in order. ``memory``: the number of the one that they lie in."""

    pieces: tuple[memoryview, ...] = ()
    memory: int = 0


class ScatteredReads(RecordReads):
    """Direct reads of whole models: expert i is layer i of the pack."""

    def __init__(self, store: ScatteredStore, reads: ReadSettings) -> None:
        super().__init__(reads)
        self._store = store
        self._sizes = store.manifest.sizes()

    def ends_at_once(self, job: Job) -> bool:
        return self._store.is_checked(job.expert, 0)

    def finish(self, job: Job) -> None:
        assert isinstance(job, ScatteredJob)
        self._store.check_pieces(job.expert, 0, job.pieces)

    def _read(self, job: Job, start: int, stop: int) -> None:
        assert isinstance(job, ScatteredJob)
        self._store.read_pieces(job.expert, 0, start, tuple(_part(job.pieces, start, stop)))

    def _nbytes(self, job: Job) -> int:
        return self._sizes[job.expert]


def _part(pieces: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of the pieces, which follow each other."""
    at = 0
    for piece in pieces:
        if at < stop and at + len(piece) > start:
            yield piece[max(start - at, 0) : stop - at]
        at += len(piece)
