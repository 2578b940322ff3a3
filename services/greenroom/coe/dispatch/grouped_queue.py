"""An executor's queue: requests of one expert side by side, each group in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from greenroom.policies.placement.placement_policy import PendingRequest, QueuedGroup


class GroupedQueue:
    """First in, first out, but for what is inserted further ahead, behind a group of its own expert."""

    def __init__(self) -> None:
        self._groups: list[tuple[int | None, deque[PendingRequest]]] = []
        self._views: list[QueuedGroup] = []  # of the groups, kept up to date: describing all for each request took long
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
        return tuple(self._views)

    def insert(self, request: PendingRequest, position: int | None) -> None:
        """Before this position (None: at the end). Raises ValueError where that is neither the end nor behind a
        request of the same expert: no policy parts a group.
        """
        self._length += 1
        if position is None or position >= self._length - 1:
            if not self._groups or self._groups[-1][0] != request.expert:
                self._groups.append((request.expert, deque()))
                self._views.append(QueuedGroup(request.expert, 0))
            self._groups[-1][1].append(request)
            self._changed(-1)
            return
        for place, (expert, group) in enumerate(self._groups):
            position -= len(group)
            if position <= 0:
                if position < 0 or expert != request.expert:
                    break
                group.append(request)
                self._changed(place)
                return
        self._length -= 1
        raise ValueError(f"a request of expert {request.expert} can not come among others")

    def take(self, most: int) -> list[PendingRequest]:
        """The first requests, all of one expert and at most so many."""
        _, group = self._groups[0]
        taken = [group.popleft() for _ in range(min(most, len(group)))]
        if group:
            self._changed(0)
        else:
            del self._groups[0], self._views[0]
        self._length -= len(taken)
        return taken

    def remove(self, request: PendingRequest) -> PendingRequest | None:
        """Take out the one of the same id, wherever it is in the groups of its expert. None: it is not here."""
        for place, (expert, group) in enumerate(self._groups):
            if expert != request.expert:
                continue
            for at, one in enumerate(group):
                if one.request_id == request.request_id:
                    del group[at]
                    if group:
                        self._changed(place)
                    else:
                        self._drop(place)
                    self._length -= 1
                    return one
        return None

    def remove_all(self, expert: int | None) -> list[PendingRequest]:
        """Take out all requests of this expert."""
        removed = [request for own, group in self._groups if own == expert for request in group]
        self._length -= len(removed)
        for place in reversed(range(len(self._groups))):
            if self._groups[place][0] == expert:
                self._drop(place)
        return removed

    def _drop(self, place: int) -> None:
        """The group leaves. Its neighbours become one if they are of one expert."""
        del self._groups[place], self._views[place]
        if 0 < place < len(self._groups) and self._groups[place - 1][0] == self._groups[place][0]:
            self._groups[place - 1][1].extend(self._groups[place][1])
            del self._groups[place], self._views[place]
            self._changed(place - 1)

    def _changed(self, place: int) -> None:
        expert, group = self._groups[place]
        self._views[place] = QueuedGroup(expert, len(group))
