"""Up to where a consumer may commit: everything before it is finished, whatever finished out of order behind it."""

from __future__ import annotations

import heapq


class PrefixTracker:
    """Offsets of one partition between reading and being finished.

    ``position``: the offset to commit, all before it being finished. It never goes back. Offsets may have gaps (a
    compacted topic, a transaction's markers) and come in rising order. One tracker serves one assignment of the
    partition; when that is revoked the tracker goes with it.
    """

    def __init__(self, position: int) -> None:
        self._open: list[int] = []
        self._done: set[int] = set()
        self._unfinished: set[int] = set()
        self._next = position

    @property
    def position(self) -> int:
        """What can be committed now: the next offset to read if this process began anew."""
        return self._open[0] if self._open else self._next

    @property
    def open(self) -> int:
        """How many offsets have been read and are not finished."""
        return len(self._unfinished)

    @property
    def span(self) -> int:
        """How far reading is ahead of ``position``, finished ones included: what a restart would read again."""
        return self._next - self.position

    def start(self, offset: int) -> None:
        """``offset`` has been read. Raises ValueError if it, or a later one, had been before."""
        if offset < self._next:
            raise ValueError(f"offset {offset} was read already: the next is {self._next}")
        self._next = offset + 1
        heapq.heappush(self._open, offset)
        self._unfinished.add(offset)

    def finish(self, offset: int) -> None:
        """``offset`` needs not be read again. Raises ValueError if it was not started or is finished."""
        if offset not in self._unfinished:
            raise ValueError(f"offset {offset} is not open")
        self._unfinished.remove(offset)
        self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.remove(heapq.heappop(self._open))
