"""Dependency-aware request scheduling: which executor, and where in its queue (CoServe, ASPLOS 2025, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    Placement,
    PlacementDecision,
    PlacementPolicy,
    PlacementState,
    QueuedGroup,
    Shed,
    WorkerView,
)


class CoServePlacement(PlacementPolicy):
    """Assigns each request, in order of arrival, to the executor after which all are done soonest.

    A request adds K to an executor's time, and B where it neither runs nor queues a request of the same expert, and the
    expert's loading where that is neither resident nor queued for. The chosen executor is the one with room for which
    the longest of all executors' times becomes least; of equals, that to which it adds least; then that with the least
    time.

    In the queue the request comes behind the last one of its expert, else at the end (*arranging*). Without
    ``arranging`` it always comes at the end. Without ``assigning`` the executor with the fewest requests gets it. These
    are the paper's ablations (Fig. 15).
    """

    def __init__(self, *, assigning: bool = True, arranging: bool = True) -> None:
        self._assigning = assigning
        self._arranging = arranging
        self.needs_groups = assigning or arranging
        self._queues: dict[str, _Queue] = {}
        """By executor, as the last decision saw them. Most have not changed since."""

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        self._queues = {view.worker: self._queue_of(view) for view in state.workers}
        executors = [_Executor(view, self._queues[view.worker]) for view in state.workers]
        largest = max((view.kv_total for view in state.workers), default=None)
        place: list[Placement] = []
        shed: list[Shed] = []
        for request in state.pending:
            if now_ms >= request.deadline_ms:
                shed.append(Shed(request.request_id, "expired"))
                continue
            if largest is not None and request.kv_most > largest:
                shed.append(Shed(request.request_id, "unservable"))
                continue
            able = [executor for executor in executors if executor.room > 0 and executor.holds(request)]
            if able:
                chosen = self._least(request, able, executors) if self._assigning else min(able, key=_even)
                place.append(Placement(request.request_id, chosen.name, chosen.take(request, arrange=self._arranging)))
        return PlacementDecision(tuple(place), tuple(shed))

    def _queue_of(self, view: WorkerView) -> _Queue:
        known, groups = self._queues.get(view.worker), view.queue_groups
        if known is not None and known.groups is groups and known.costs is view.costs:
            return known
        return _queue(groups, view.costs)

    def _least(self, request: PendingRequest, able: Iterable[_Executor], everyone: Iterable[_Executor]) -> _Executor:
        longest = max(executor.left_ms for executor in everyone)

        def after(executor: _Executor) -> tuple[float, float, float, str]:
            adds = executor.adds_ms(request.expert)
            return max(longest, executor.left_ms + adds), adds, executor.left_ms, executor.name

        return min(able, key=after)


@dataclass(frozen=True, slots=True)
class _Queue:
    """What follows from an executor's queue alone. To find it is most of what a decision takes.

    ``queued_ms``: K of all ``requests`` and B of all experts. ``last``: by expert, the place of its last group.
    ``load_ms``: of each expert.
    """

    groups: Sequence[QueuedGroup]
    costs: Costs
    requests: int
    queued_ms: float
    last: dict[int | None, int]
    load_ms: dict[int | None, float]


def _queue(groups: Sequence[QueuedGroup], costs: Costs) -> _Queue:
    """As ``adds_ms`` of every request, written out."""
    # Nobody has the key None, so where the expert is not known what is usual counts.
    request_ms: Mapping[Any, float] = costs.request_ms_by_expert
    batch_ms: Mapping[Any, float] = costs.batch_ms_by_expert
    load_ms: Mapping[Any, float] = costs.load_ms_by_expert
    last = {expert: place for place, (expert, _) in enumerate(groups)}
    computing = sum([requests * request_ms.get(expert, costs.token_ms) for expert, requests in groups])
    beginning = sum([batch_ms.get(expert, costs.batch_ms) for expert in last])
    return _Queue(
        groups,
        costs,
        requests=sum([requests for _, requests in groups]),
        queued_ms=computing + beginning,
        last=last,
        load_ms={expert: load_ms.get(expert, 0.0) for expert in last},
    )


class _Executor:
    """An executor with what this decision has given it so far.

    ``left_ms``: predicted until all that it has is done.
    """

    __slots__ = (
        "_costs", "_counts", "_last", "_queue", "_ready", "_running", "kv_free", "kv_total", "left_ms", "name",
        "requests", "room",
    )  # fmt: skip

    def __init__(self, view: WorkerView, queue: _Queue) -> None:
        self.name = view.worker
        self.kv_free, self.kv_total = view.kv_free, view.kv_total
        self.requests = len(view.running) + queue.requests
        self.room = view.max_running + view.max_queued - self.requests
        self._costs = view.costs
        self._ready = ready = set(view.resident.tolist())
        self._running = {placed.request.expert for placed in view.running}
        self._queue = queue
        self._counts: list[int] | None = None
        """Requests of each group, from where this decision changes them on: the queue is later decisions' too."""
        self._last = queue.last
        begun = sum(view.costs.batch_ms_of(expert) for expert in self._running if expert in queue.last)
        loads = sum([ms for expert, ms in queue.load_ms.items() if expert not in ready])
        self.left_ms = view.busy_ms + queue.queued_ms - begun + loads

    def holds(self, request: PendingRequest) -> bool:
        """Whether there is memory for what it is expected to need, and would be for the most that it may."""
        return request.kv_need <= self.kv_free and request.kv_most <= self.kv_total

    def adds_ms(self, expert: int | None) -> float:
        """By how much a request of this expert would prolong ``left_ms``."""
        added = self._costs.request_ms(expert)
        if expert in self._last:
            return added
        if expert not in self._running:
            added += self._costs.batch_ms_of(expert)
        return added if expert in self._ready else added + self._costs.load_ms(expert)

    def take(self, request: PendingRequest, *, arrange: bool) -> int | None:
        """Give it the request. Returns its position in the queue; None: at the end."""
        expert = request.expert
        self.left_ms += self.adds_ms(expert)
        self.kv_free -= request.kv_need
        self.room -= 1
        self.requests += 1
        if self._counts is None:
            self._counts, self._last = [group.requests for group in self._queue.groups], self._last.copy()
        group = self._last.get(expert)
        end = len(self._counts) - 1
        if group is None or (group < end and not arrange):
            self._last[expert] = len(self._counts)
            self._counts.append(1)
            return None
        self._counts[group] += 1
        return None if group == end else sum(self._counts[: group + 1]) - 1


def _even(executor: _Executor) -> tuple[int, str]:
    return executor.requests, executor.name
