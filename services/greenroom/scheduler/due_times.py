"""When a pool has to look at each of its requests again."""

from __future__ import annotations

import heapq
import math

_SPARE = 64


class DueTimes:
    """The next due time of each request, in a heap. What was set earlier for another time is passed over.

    The heap has at most twice as many entries as there are requests with a due time, and a few more.
    """

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Requests that have a due time."""
        return len(self._next)

    def of(self, request_id: str) -> float:
        """Infinite where it has none."""
        return self._next.get(request_id, math.inf)

    def at(self, request_id: str, due: float) -> None:
        """It is due at the latest then. An earlier time that was set before stays."""
        if due < self._next.get(request_id, math.inf):
            self._next[request_id] = due
            heapq.heappush(self._heap, (due, request_id))
            if len(self._heap) > 2 * len(self._next) + _SPARE:
                self._heap = [(when, one) for one, when in self._next.items()]
                heapq.heapify(self._heap)

    def forget(self, request_id: str) -> None:
        self._next.pop(request_id, None)

    def take(self, now: float) -> list[str]:
        """The requests that are due, each once; they have no due time then."""
        found: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due, request_id = heapq.heappop(self._heap)
            if self._next.get(request_id) == due:
                del self._next[request_id]
                found.append(request_id)
        return found
