"""An executor's queue: requests of one expert side by side, each group in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from greenroom.policies.placement.placement_policy import PendingRequest, QueuedGroup


class GroupedQueue:
    """First in, first out, but for what is inserted further ahead, behind a group of its own expert."""

    def __init__(self) -> None:
        self._groups: list[tuple[int | None, deque[PendingRequest]]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PendingRequest]:
        for _, group in self._groups:
            yield from group

    @property
    def head(self) -> int | None:
        """The expert of the first group. Raises IndexError where there is none."""
        return self._groups[0][0]

    def first_but(self, expert: int | None) -> int | None:
        """The expert of the first group that is not this one's; None: there is none."""
        return next((own for own, _ in self._groups if own != expert), None)

    def groups(self) -> tuple[QueuedGroup, ...]:
        return tuple(QueuedGroup(expert, len(group)) for expert, group in self._groups)

    def insert(self, request: PendingRequest, position: int | None) -> None:
        """Before this position (None: at the end). Raises ValueError where that is neither the end nor behind a
        request of the same expert: no policy parts a group.
        """
        self._length += 1
        if position is None or position >= self._length - 1:
            if not self._groups or self._groups[-1][0] != request.expert:
                self._groups.append((request.expert, deque()))
            self._groups[-1][1].append(request)
            return
        for expert, group in self._groups:
            position -= len(group)
            if position <= 0:
                if position < 0 or expert != request.expert:
                    break
                group.append(request)
                return
        self._length -= 1
        raise ValueError(f"a request of expert {request.expert} can not come among others")

    def take(self, most: int) -> list[PendingRequest]:
        """The first requests, all of one expert and at most so many."""
        _, group = self._groups[0]
        taken = [group.popleft() for _ in range(min(most, len(group)))]
        if not group:
            del self._groups[0]
        self._length -= len(taken)
        return taken

    def remove(self, request_id: str) -> PendingRequest | None:
        """Take one out, wherever it is. None: it is not here. Takes time in proportion to the queue."""
        for place, (_, group) in enumerate(self._groups):
            for request in group:
                if request.request_id == request_id:
                    group.remove(request)
                    if not group:
                        del self._groups[place]
                    self._length -= 1
                    return request
        return None
