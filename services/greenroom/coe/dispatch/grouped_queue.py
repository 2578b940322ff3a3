"""An executor's queue: requests of one expert side by side, each group in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from greenroom.policies.placement.placement_policy import PendingRequest, QueuedGroup


class _Group:
    """Requests of one expert, by id, and the groups before and behind them."""

    __slots__ = ("before", "behind", "expert", "requests", "view")

    def __init__(self, expert: int | None, before: _Group | None) -> None:
        self.expert = expert
        self.requests: OrderedDict[str, PendingRequest] = OrderedDict()  # not a dict: its first one is found at once
        self.before = before
        self.behind: _Group | None = None
        self.view = QueuedGroup(expert, 0)
        """As policies last saw it."""


class GroupedQueue:
    """First in, first out, but for what is inserted further ahead, behind a group of its own expert.

    To take a request out costs the same however many are here.
    """

    def __init__(self) -> None:
        self._first: _Group | None = None
        self._last: _Group | None = None
        self._group_of: dict[str, _Group] = {}
        self._described: tuple[QueuedGroup, ...] | None = ()

    def __len__(self) -> int:
        return len(self._group_of)

    def __iter__(self) -> Iterator[PendingRequest]:
        for group in self._groups():
            yield from group.requests.values()

    @property
    def head(self) -> int | None:
        """The expert of the first group. Raises IndexError where there is none."""
        if self._first is None:
            raise IndexError("the queue is empty")
        return self._first.expert

    def first_but(self, expert: int | None) -> PendingRequest | None:
        """The first request of the first group that is not this expert's; None: there is none."""
        group = next((group for group in self._groups() if group.expert != expert), None)
        return None if group is None else next(iter(group.requests.values()))

    def groups(self) -> tuple[QueuedGroup, ...]:
        """Asked for with each request that is placed anywhere: so it is written out, and kept until it changes."""
        if self._described is None:
            found, group = [], self._first
            while group is not None:
                if group.view.requests != len(group.requests):
                    group.view = QueuedGroup(group.expert, len(group.requests))
                found.append(group.view)
                group = group.behind
            self._described = tuple(found)
        return self._described

    def insert(self, request: PendingRequest, position: int | None) -> None:
        """Before this position (None: at the end). Raises ValueError where that is neither the end nor behind a
        request of the same expert: no policy parts a group. And if a request of this id is here.
        """
        if request.request_id in self._group_of:
            raise ValueError(f"{request.request_id} is in the queue already")
        if position is None or position >= len(self):
            group = self._last
            if group is None or group.expert != request.expert:
                group = self._append(request.expert)
        else:
            group = self._ending_at(position)
            if group is None or group.expert != request.expert:
                raise ValueError(f"a request of expert {request.expert} can not come among others")
        self._described = None
        group.requests[request.request_id] = request
        self._group_of[request.request_id] = group

    def take(self, most: int) -> list[PendingRequest]:
        """The first requests, all of one expert and at most so many."""
        group = self._first
        assert group is not None, "only what is there can be taken"
        self._described = None
        taken = [group.requests.popitem(last=False)[1] for _ in range(min(most, len(group.requests)))]
        for request in taken:
            del self._group_of[request.request_id]
        if not group.requests:
            self._drop(group)
        return taken

    def remove(self, request: PendingRequest) -> PendingRequest | None:
        """Take out the one of the same id and expert. None: it is not here."""
        group = self._group_of.get(request.request_id)
        if group is None or group.expert != request.expert:
            return None
        self._described = None
        one = group.requests.pop(request.request_id)
        del self._group_of[request.request_id]
        if not group.requests:
            self._drop(group)
        return one

    def remove_all(self, expert: int | None) -> list[PendingRequest]:
        """Take out all requests of this expert."""
        self._described = None
        own = [group for group in self._groups() if group.expert == expert]
        removed = [request for group in own for request in group.requests.values()]
        for request in removed:
            del self._group_of[request.request_id]
        for group in own:
            self._drop(group)
        return removed

    def _groups(self) -> Iterator[_Group]:
        group = self._first
        while group is not None:
            yield group
            group = group.behind

    def _ending_at(self, position: int) -> _Group | None:
        """The group whose last request stands before this position."""
        for group in self._groups():
            position -= len(group.requests)
            if position <= 0:
                return group if position == 0 else None
        return None

    def _append(self, expert: int | None) -> _Group:
        group = _Group(expert, self._last)
        self._link(self._last, group)
        self._link(group, None)
        return group

    def _drop(self, group: _Group) -> None:
        """The group leaves. Its neighbours become one if they are of one expert."""
        before, behind = group.before, group.behind
        self._link(before, behind)
        if before is not None and behind is not None and before.expert == behind.expert:
            self._join(before, behind)

    def _join(self, before: _Group, behind: _Group) -> None:
        """Neighbours become one. The smaller one's requests go to the larger one, so each moves a few times at most."""
        if len(before.requests) >= len(behind.requests):
            whole, gone = before, behind
            whole.requests.update(gone.requests)
        else:
            whole, gone = behind, before
            for name, request in reversed(gone.requests.items()):
                whole.requests[name] = request
                whole.requests.move_to_end(name, last=False)
        self._group_of.update(dict.fromkeys(gone.requests, whole))
        if gone is before:
            self._link(gone.before, whole)
        else:
            self._link(whole, gone.behind)

    def _link(self, before: _Group | None, behind: _Group | None) -> None:
        """They stand side by side. None: the queue's end."""
        if before is None:
            self._first = behind
        else:
            before.behind = behind
        if behind is None:
            self._last = before
        else:
            behind.before = before
