"""The offset that a consumer may commit: all records before it are finished, though others may be out of order."""

from __future__ import annotations

import heapq


class PrefixTracker:
    """The offsets of one partition that were read and are not finished.

    ``position``: the offset to commit; all before it are finished. It never goes back. Offsets come in rising order and
    may have gaps (a compacted topic, a transaction's markers). One tracker serves one assignment of the partition, and
    is dropped when that is revoked.
    """

    def __init__(self, position: int) -> None:
        self._open: list[int] = []
        self._done: set[int] = set()
        self._unfinished: set[int] = set()
        self._next = position

    @property
    def position(self) -> int:
        """The offset to commit now: a process that began anew would read from here."""
        return self._open[0] if self._open else self._next

    @property
    def open(self) -> int:
        """How many offsets have been read and are not finished."""
        return len(self._unfinished)

    @property
    def span(self) -> int:
        """How many offsets a restart would read again: from ``position`` on, finished ones included."""
        return self._next - self.position

    def start(self, offset: int) -> None:
        """``offset`` has been read. Raises ValueError if it or a later one was read before."""
        if offset < self._next:
            raise ValueError(f"offset {offset} was read already: the next is {self._next}")
        self._next = offset + 1
        heapq.heappush(self._open, offset)
        self._unfinished.add(offset)

    def finish(self, offset: int) -> None:
        """``offset`` is finished. Raises ValueError if it was not started, or was finished before."""
        if offset not in self._unfinished:
            raise ValueError(f"offset {offset} is not open")
        self._unfinished.remove(offset)
        self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.remove(heapq.heappop(self._open))
