"""Requests of known ways through a graph, served on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greenroom.coe.dispatch.base import Dispatcher
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.policies.placement.placement_policy import PendingRequest

_NEVER_MS = 1e15


@dataclass(frozen=True, slots=True)
class Way:
    """``experts``: those that the request needs, in this order."""

    arrives_ms: float
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """``latencies_ms[i]``: of the i-th request, to the end of its last stage. ``loads``: after the first fill.
    ``loads_by_memory``: the same, those that have come.
    """

    latencies_ms: tuple[float, ...]
    total_ms: float
    loads: int
    link_busy_ms: float
    computed_ms: float
    batches: int
    loads_by_memory: tuple[int, ...] = ()

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return 1000 * len(self.latencies_ms) / self.total_ms


def simulate(
    dispatcher: Dispatcher,
    memories: Sequence[SimulatedMemory],
    link: SimulatedLink,
    batch_ms: Callable[[int, int], float],
    ways: Sequence[Way],
) -> Served:
    """``batch_ms(expert, requests)``: what a batch takes. Raises RuntimeError where requests wait and nothing moves."""
    arrivals = sorted(range(len(ways)), key=lambda number: ways[number].arrives_ms)
    ends: list[tuple[float, int, str, tuple[PendingRequest, ...]]] = []
    done: dict[int, float] = {}
    order, place, now, computed, batches = itertools.count(), 0, 0.0, 0.0, 0
    while len(done) < len(ways):
        following = [link.next_ms if link.next_ms is not None else _NEVER_MS, ends[0][0] if ends else _NEVER_MS]
        following.append(ways[arrivals[place]].arrives_ms if place < len(arrivals) else _NEVER_MS)
        following.append(_NEVER_MS if dispatcher.asks_ms is None else max(now, dispatcher.asks_ms))
        if min(following) == _NEVER_MS:
            raise RuntimeError(f"{dispatcher.waiting} requests wait, and nothing moves: a defect of the dispatcher")
        now = min(following)
        for memory in memories:
            memory.now_ms = now
        link.deliver(now)
        new = []
        while ends and ends[0][0] <= now:
            _, _, executor, requests = heapq.heappop(ends)
            dispatcher.finished(executor, now)
            for request in requests:
                number, stage = int(request.request_id), request.stage + 1
                if stage < len(ways[number].experts):
                    new.append(_stage(number, stage, ways[number], now))
                else:
                    done[number] = now
        while place < len(arrivals) and ways[arrivals[place]].arrives_ms <= now:
            new.append(_stage(arrivals[place], 0, ways[arrivals[place]], now))
            place += 1
        if new:
            dispatcher.arrived(new, now)
        for run in dispatcher.next_runs(now):
            takes = batch_ms(run.expert, len(run.requests))
            computed, batches = computed + takes, batches + 1
            heapq.heappush(ends, (now + takes, next(order), run.executor, run.requests))
    return Served(
        tuple(done[number] - ways[number].arrives_ms for number in range(len(ways))),
        now, link.loads, link.busy_ms, computed, batches,
        tuple(memory.counters.loads for memory in memories),
    )  # fmt: skip


def _stage(number: int, stage: int, way: Way, now_ms: float) -> PendingRequest:
    """A stage's group waits since the stage can run, not since its request has come."""
    return PendingRequest(str(number), now_ms, 1, 1, 1, _NEVER_MS, expert=way.experts[stage], stage=stage)
