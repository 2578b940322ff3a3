"""What a fill still brings to a tier, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import merge
from itertools import islice

from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.slot_sizes import SlotSizes


class FillQueue:
    """Experts in one order, of which those can be taken whose size classes have room. The others keep their turns."""

    def __init__(self, sizes: SlotSizes) -> None:
        self._classes: list[int] = sizes.class_of.tolist()
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(sizes.classes)]  # turns, experts
        self._first = self._end = 0  # of the turns that were given

    def __bool__(self) -> bool:
        return any(self._queues)

    def extend(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self._queues[self._classes[expert]].append((self._end, expert))
            self._end += 1

    def put_back(self, expert: int) -> None:
        """It is the next one."""
        self._first -= 1
        self._queues[self._classes[expert]].appendleft((self._first, expert))

    def take(self, open_classes: Iterable[int]) -> int | None:
        """The next expert of these size classes. None: they have none."""
        waiting = [self._queues[number] for number in open_classes if self._queues[number]]
        return min(waiting, key=lambda queue: queue[0]).popleft()[1] if waiting else None

    def within(self, places: Iterable[int]) -> list[int]:
        """Those that ``places[classes]`` have room for, in their order."""
        found = (islice(queue, count) for queue, count in zip(self._queues, places, strict=True))
        return [expert for _, expert in merge(*found)]

    def count_within(self, places: Iterable[int]) -> int:
        """How many ``within`` gives."""
        return sum(min(len(queue), count) for queue, count in zip(self._queues, places, strict=True))

    def drop(self, unwanted: Mask) -> None:
        """Forget those of ``unwanted[experts]``."""
        self._queues = [deque(turn for turn in queue if not unwanted[turn[1]]) for queue in self._queues]

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()
