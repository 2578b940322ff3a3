"""Requests wait by their expert until an executor is free: ``pull``, our own."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.placement.placement_policy import PendingRequest, Shed


class LateBinding(Dispatcher):
    """One memory for all executors. A free executor takes a full batch of the group that has waited longest of those
    whose expert is there. Meanwhile the expert of the missing group that has waited longest is brought, ``ahead`` at a
    time.

    An expert that requests wait for leaves only for a group that has waited ``age_ms``, and longer than every group
    whose expert is there. So no group waits for ever, and what was brought for one is not taken away before it has run.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        executors: Sequence[str],
        most: Mapping[int, int],
        *,
        age_ms: float = 5000.0,
        ahead: int = 1,
    ) -> None:
        self._memory = memory
        self._most = most
        self._age_ms = age_ms
        self._ahead = ahead
        self._runs: dict[str, Run | None] = dict.fromkeys(executors)
        self._groups: dict[int, OrderedDict[str, PendingRequest]] = {}  # not a dict: its first one is found at once

    @property
    def waiting(self) -> int:
        return sum(map(len, self._groups.values()))

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        """Sheds none."""
        for request in requests:
            assert request.expert is not None
            self._groups.setdefault(request.expert, OrderedDict())[request.request_id] = request
            self._memory.waits(request)
        return ()

    def finished(self, executor: str, now_ms: float) -> None:
        run = self._runs[executor]
        assert run is not None
        self._memory.release(run.expert)
        self._runs[executor] = None

    def cancel(self, request: PendingRequest) -> bool:
        assert request.expert is not None
        group = self._groups.get(request.expert, OrderedDict())
        one = group.pop(request.request_id, None)
        if one is None:
            return False
        if not group:
            del self._groups[request.expert]
        self._memory.forget(one, SequenceEnd.CANCELLED)
        return True

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        lost = tuple(self._groups.pop(expert, OrderedDict()).values())
        for request in lost:
            self._memory.forget(request, SequenceEnd.FAILED)
        return lost

    def next_runs(self, now_ms: float) -> list[Run]:
        runs: list[Run] = []
        if not self._bring(now_ms):
            return runs  # what is computed now is in the way of a group that has waited too long: until it has ended
        for name, run in self._runs.items():
            if run is None and (there := self._longest_there()) is not None:
                expert = there[1]
                group = self._groups[expert]
                requests = tuple(group.popitem(last=False)[1] for _ in range(min(self._most[expert], len(group))))
                if not group:
                    del self._groups[expert]
                self._memory.hold(expert, requests)
                runs.append(Run(name, expert, requests))
                self._runs[name] = runs[-1]
        if runs:
            self._bring(now_ms)  # for nobody may wait now for what these requests waited for
        return runs

    def _longest_there(self) -> tuple[float, int] | None:
        """Of the groups whose expert is there, that which has waited longest: since when, and the expert."""
        has = self._memory.has
        return min(((_since(group), expert) for expert, group in self._groups.items() if has(expert)), default=None)

    def _bring(self, now_ms: float) -> bool:
        """Of the missing groups bring those that have waited longest, as few as keep the link busy.

        False: there is no room for one that has waited ``age_ms`` and longer than all that could run, and only what is
        computed now is in its way.
        """
        if self._memory.loading >= self._ahead:
            return True
        has, there, missing = self._memory.has, (math.inf, 0), list[tuple[float, int]]()
        for expert, group in self._groups.items():
            since = _since(group), expert
            if not has(expert):
                missing.append(since)
            elif since < there:
                there = since
        heapq.heapify(missing)
        while missing and self._memory.loading < self._ahead:
            longest = heapq.heappop(missing)
            arrived_ms, expert = longest
            # Else two groups that have both waited long would take each other's place, and neither would run.
            forces = now_ms - arrived_ms >= self._age_ms and there > longest
            if not self._memory.fetch(expert, whoever=forces):
                return not forces
        return True


def _since(group: OrderedDict[str, PendingRequest]) -> float:
    """When its first request arrived."""
    return next(iter(group.values())).arrived_ms
