"""Dependency-aware request scheduling: which executor, and where in its queue (CoServe, ASPLOS 2025, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.policies.placement.placement_policy import (
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

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        executors = [_Executor(view) for view in state.workers]
        largest = max((view.kv_total for view in state.workers), default=None)
        place: list[Placement] = []
        shed: list[Shed] = []
        for request in state.pending:
            if now_ms >= request.deadline_ms:
                shed.append(Shed(request.request_id, "expired"))
                continue
            if largest is not None and request.kv_need > largest:
                shed.append(Shed(request.request_id, "unservable"))
                continue
            able = [executor for executor in executors if executor.room > 0 and request.kv_need <= executor.kv_free]
            if able:
                chosen = self._least(request, able, executors) if self._assigning else min(able, key=_even)
                place.append(Placement(request.request_id, chosen.name, chosen.take(request, arrange=self._arranging)))
        return PlacementDecision(tuple(place), tuple(shed))

    def _least(self, request: PendingRequest, able: Iterable[_Executor], everyone: Iterable[_Executor]) -> _Executor:
        longest = max(executor.left_ms for executor in everyone)

        def after(executor: _Executor) -> tuple[float, float, float, str]:
            adds = executor.adds_ms(request.expert)
            return max(longest, executor.left_ms + adds), adds, executor.left_ms, executor.name

        return min(able, key=after)


class _Executor:
    """An executor with what this decision has given it so far.

    ``left_ms``: predicted until all that it has is done. It is found once a decision, from its groups.
    """

    __slots__ = ("_costs", "_groups", "_last", "_ready", "_running", "kv_free", "left_ms", "name", "requests", "room")

    def __init__(self, view: WorkerView) -> None:
        self.name = view.worker
        self.kv_free = view.kv_free
        self.requests = len(view.running) + view.queue_length
        self.room = view.max_running + view.max_queued - self.requests
        self.left_ms = view.busy_ms
        self._costs = view.costs
        self._ready = set(view.resident.tolist())
        self._running = {placed.request.expert for placed in view.running}
        self._groups: list[int] = []  # requests of each, in the order of the queue
        self._last: dict[int | None, int] = {}  # by expert, the place of its last group
        self._add_groups(view.queue_groups)

    def _add_groups(self, groups: Iterable[QueuedGroup]) -> None:
        """``adds_ms`` of every group's requests, written out: this is most of what a decision takes."""
        costs, left_ms = self._costs, self.left_ms
        request_ms, batch_ms, load_ms = (
            costs.request_ms_by_expert, costs.batch_ms_by_expert, costs.load_ms_by_expert
        )  # fmt: skip
        usual_ms, usual_batch_ms, last, ready, running = (
            costs.token_ms, costs.batch_ms, self._last, self._ready, self._running
        )  # fmt: skip
        for place, (expert, requests) in enumerate(groups):
            left_ms += requests * request_ms.get(expert, usual_ms)  # type: ignore[arg-type]  # nobody has the key None
            if expert not in last:
                if expert not in running:
                    left_ms += batch_ms.get(expert, usual_batch_ms)  # type: ignore[arg-type]
                if expert not in ready:
                    left_ms += load_ms.get(expert, 0.0)  # type: ignore[arg-type]
            last[expert] = place
            self._groups.append(requests)
        self.left_ms = left_ms

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
        group = self._last.get(expert)
        end = len(self._groups) - 1
        if group is None or (group < end and not arrange):
            self._last[expert] = len(self._groups)
            self._groups.append(1)
            return None
        self._groups[group] += 1
        return None if group == end else sum(self._groups[: group + 1]) - 1


def _even(executor: _Executor) -> tuple[int, str]:
    return executor.requests, executor.name
