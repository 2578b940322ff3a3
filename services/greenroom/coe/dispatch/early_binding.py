"""Requests are given to an executor when they arrive, and wait in its queue (CoServe, section 4.2; its baselines)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.coe.dispatch.grouped_queue import GroupedQueue
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacedRequest,
    PlacementPolicy,
    PlacementState,
    QueuedGroup,
    Shed,
    WorkerView,
)

_ROOM = 1 << 30
"""The queues hold whatever was accepted: how much that is, is bounded where requests come in."""


@dataclass(slots=True)
class Executor:
    """``costs``: K, B and loading, by expert. ``most[expert]``: the largest batch. ``begun_ms``: of what it runs."""

    name: str
    memory: ExpertMemory
    costs: Costs
    most: Mapping[int, int]
    queue: GroupedQueue = field(default_factory=GroupedQueue)
    runs: Run | None = None
    begun_ms: float = 0.0
    running: tuple[PlacedRequest, ...] = ()
    """The requests of what it runs, as policies see them: made once, since they are looked at with every arrival."""

    @property
    def following(self) -> PendingRequest | None:
        """The first request of the group that comes after what it runs; None: there is none."""
        return self.queue.first_but(None if self.runs is None else self.runs.expert)

    def busy_ms(self, now_ms: float) -> float:
        """Predicted until it has computed what it computes now."""
        if self.runs is None:
            return 0.0
        expert = self.runs.expert
        takes = self.costs.batch_ms_of(expert) + len(self.runs.requests) * self.costs.request_ms(expert)
        return max(0.0, self.begun_ms + takes - now_ms)


class EarlyBinding(Dispatcher):
    """``placement`` chooses the executor and the place in its queue.

    An executor takes as many requests of its first group as a batch may have. While it computes, the next group's
    expert is brought; unless ``ahead``, only when its turn has come. Where executors share a memory, the group that
    has waited longest is brought first. If one that has waited ``age_ms`` finds no room, nothing else begins or is
    brought until it has. So no executor keeps another from ever beginning.
    """

    def __init__(
        self,
        placement: PlacementPolicy,
        executors: Sequence[Executor],
        *,
        age_ms: float = 5000.0,
        ahead: bool = True,
    ) -> None:
        self._placement = placement
        self._age_ms = age_ms
        self._ahead = ahead
        self._shares = len({id(executor.memory) for executor in executors}) < len(executors)
        self._executors = {executor.name: executor for executor in executors}
        self._pending: dict[str, PendingRequest] = {}

    @property
    def waiting(self) -> int:
        return len(self._pending) + sum(len(executor.queue) for executor in self._executors.values())

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        self._pending.update((request.request_id, request) for request in requests)
        views = tuple(self._view(executor, now_ms) for executor in self._executors.values())
        decision = self._placement.decide(PlacementState(tuple(self._pending.values()), views), now_ms)
        for one in decision.place:
            request, executor = self._pending.pop(one.request_id), self._executors[one.worker]
            executor.queue.insert(request, one.position)
            executor.memory.waits(request)
        for shed in decision.shed:
            del self._pending[shed.request_id]
        return decision.shed

    def finished(self, executor: str, now_ms: float) -> None:
        own = self._executors[executor]
        assert own.runs is not None
        own.memory.release(own.runs.expert)
        own.runs, own.running = None, ()

    def cancel(self, request: PendingRequest) -> bool:
        if self._pending.pop(request.request_id, None) is not None:
            return True
        for executor in self._executors.values():
            one = executor.queue.remove(request)
            if one is not None:
                executor.memory.forget(one, SequenceEnd.CANCELLED)
                return True
        return False

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        """Executors that share the memory lose theirs too. Those with another one do not need this read."""
        lost: list[PendingRequest] = []
        for executor in self._executors.values():
            if executor.memory is memory:
                own = executor.queue.remove_all(expert)
                for request in own:
                    memory.forget(request, SequenceEnd.FAILED)
                lost += own
        return tuple(lost)

    def next_runs(self, now_ms: float) -> list[Run]:
        runs: list[Run] = []
        if self._shares and not self._bring_aged(now_ms):
            return runs  # what is computed now is in the way of a group that has waited too long: until it has ended
        for executor in self._executors.values():
            if executor.runs is None and executor.queue:
                self._begin(executor, now_ms)
                runs += [] if executor.runs is None else [executor.runs]
        # Only now, since in a memory that they share one's next expert would take the place of what another begins.
        following = [
            (executor.following, executor.memory)
            for executor in self._executors.values()
            if self._ahead or executor.runs is None
        ]
        wanted = [(request, memory) for request, memory in following if request is not None]
        if self._shares:
            wanted.sort(key=lambda one: one[0].arrived_ms)
        for request, memory in wanted:
            assert request.expert is not None
            memory.fetch(request.expert)
        return runs

    def _bring_aged(self, now_ms: float) -> bool:
        """Bring the group that has waited longest of those that free executors are to begin with, if that is
        ``age_ms``. False: there is no room for it.

        Only that one: else two that have both waited long would take each other's place, and neither would begin.
        """
        free = [executor for executor in self._executors.values() if executor.runs is None]
        heads = [(executor.following, executor.memory) for executor in free]
        wanted = [(request, memory) for request, memory in heads if request is not None]
        if not wanted:
            return True
        request, memory = min(wanted, key=lambda one: one[0].arrived_ms)
        assert request.expert is not None
        return now_ms - request.arrived_ms < self._age_ms or memory.fetch(request.expert)

    def _begin(self, executor: Executor, now_ms: float) -> None:
        expert = executor.queue.head
        assert expert is not None
        if executor.memory.has(expert):
            requests = tuple(executor.queue.take(executor.most[expert]))
            executor.memory.hold(expert, requests)
            executor.runs, executor.begun_ms = Run(executor.name, expert, requests), now_ms
            executor.running = tuple([PlacedRequest(request, now_ms, 0, 1) for request in requests])

    def _view(self, executor: Executor, now_ms: float) -> WorkerView:
        return WorkerView(
            executor.name,
            executor.running,
            queued=(),
            max_running=_ROOM,
            max_queued=_ROOM,
            kv_total=_ROOM,
            kv_free=_ROOM,
            costs=executor.costs,
            resident=executor.memory.residents,
            groups=executor.queue.groups()
            if self._placement.needs_groups
            else (QueuedGroup(None, len(executor.queue)),),
            busy_ms=executor.busy_ms(now_ms),
        )
