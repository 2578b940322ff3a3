"""Requests a second against executors and experts in memory: the dispatchers on a virtual clock, with measured costs.

CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), sections 4.4 and 5 (Figs 17 and 18).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from greenroom.coe.computing.batch_size import batch_size, bytes_of_batch
from greenroom.coe.dispatch.base import Dispatcher
from greenroom.coe.dispatch.early_binding import EarlyBinding, Executor
from greenroom.coe.dispatch.late_binding import LateBinding
from greenroom.coe.graph.expert_graph import ExpertGraph, Shares
from greenroom.coe.simulation.simulate import Served, Way, simulate
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.core.coe_profile import ArchitectureCosts, BatchTimes
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.coserve.scheduling import CoServePlacement
from greenroom.policies.placement.placement_policy import Costs
from greenroom.policies.registry import create_policy

SCHEDULINGS: Final = ("coserve", "pull")
ARRIVES_FASTER: Final = 8.0
"""Requests come so many times as fast as executors could compute them, as the paper's come far faster than served."""


@dataclass(frozen=True, slots=True)
class Board:
    """What is replayed. ``bytes_of[N]``: of each expert in memory. ``costs[N]``: of its architecture.

    ``usage[N]``: the probability that a request needs it. ``paths``: the experts of each request, in order.
    """

    graph: ExpertGraph
    bytes_of: Sequence[int]
    costs: Sequence[ArchitectureCosts]
    usage: Shares
    paths: Sequence[tuple[int, ...]]

    @property
    def ranked(self) -> list[int]:
        """By descending probability."""
        order: list[int] = np.argsort(-self.usage, kind="stable").tolist()
        return order

    def expert_bytes(self, residents: int, executors: int) -> int:
        """Of so many most probable experts, for all executors; each can hold the largest one at least."""
        total = sum(self.bytes_of[expert] for expert in self.ranked[:residents])
        return max(total, executors * max(self.bytes_of))

    def least_bytes(self, executors: int) -> int:
        """The least memory in which every expert runs on every executor, one request at a time."""
        return executors * (max(self.bytes_of) + self._one_request())

    def fitting(self, memory_bytes: int, executors: int) -> int:
        """How many of the most probable experts fit beside one request on each executor; 0: ``least_bytes`` do not."""
        return self._fitting(memory_bytes - executors * self._one_request(), executors)

    def fitting_beside_full_batches(self, memory_bytes: int, executors: int) -> int:
        """The same beside a maximum batch on each executor: the paper's rule for processors of limited performance."""
        full = max(bytes_of_batch(one.bytes_by_batch, _times(one, executors).most) for one in self.costs)
        return self._fitting(memory_bytes - executors * full, executors)

    def _fitting(self, room: int, executors: int) -> int:
        return max((n for n in range(1, len(self.graph) + 1) if self.expert_bytes(n, executors) <= room), default=0)

    def _one_request(self) -> int:
        return max(bytes_of_batch(costs.bytes_by_batch, 1) for costs in self.costs)


def drawn_paths(graph: ExpertGraph, requests: int, seed: int) -> list[tuple[int, ...]]:
    """Ways of so many requests, drawn by their probabilities."""
    lots = random.Random(seed)
    return [graph.draw_path(lots.random) for _ in range(requests)]


def replay(board: Board, scheduling: str, executors: int, memory_bytes: int, expert_bytes: int) -> Served | None:
    """A burst of the board's requests on so many executors, of whose memory experts get ``expert_bytes``.

    None: what is left does not hold the intermediates of one request on each executor.
    """
    times = [_times(costs, executors) for costs in board.costs]
    free = (memory_bytes - expert_bytes) // executors
    most = {
        expert: batch_size(own.most, free, costs.bytes_by_batch, own.most)
        for expert, (own, costs) in enumerate(zip(times, board.costs, strict=True))
    }
    if min(most.values()) < 1:
        return None
    link = SimulatedLink(lambda expert: board.costs[expert].load_ms)
    dispatcher, memories = _assembled(board, scheduling, executors, expert_bytes, link, times, most)
    return simulate(dispatcher, memories, link, _batch_ms(times), _arriving(board.paths, times, executors))


def _assembled(
    board: Board,
    scheduling: str,
    executors: int,
    expert_bytes: int,
    link: SimulatedLink,
    times: Sequence[BatchTimes],
    most: Mapping[int, int],
) -> tuple[Dispatcher, list[SimulatedMemory]]:
    """Memories are filled by descending probability, dealt in turn until nothing fits (section 4.1)."""
    catalogue = Catalogue.of_models("replayed", board.bytes_of)
    options: dict[str, Any] = {"dependencies": Dependencies(board.usage, board.graph.predecessors)}
    names = [f"executor {number}" for number in range(executors)]
    shared = scheduling == "pull"
    memories = [
        SimulatedMemory(create_policy(scheduling, catalogue=catalogue, options=options), expert_bytes // parts, link)
        for parts in ([1] if shared else [executors] * executors)
    ]
    for place, memory in enumerate(memories):
        memory.fill(board.ranked[place :: len(memories)])
    if shared:
        return LateBinding(memories[0], names, most), memories
    costs = Costs(
        load_ms_by_expert={expert: one.load_ms for expert, one in enumerate(board.costs)},
        request_ms_by_expert={expert: one.request_ms for expert, one in enumerate(times)},
        batch_ms_by_expert={expert: one.batch_ms for expert, one in enumerate(times)},
    )
    given = [Executor(name, memory, costs, most) for name, memory in zip(names, memories, strict=True)]
    return EarlyBinding(CoServePlacement(), given), memories


def _times(costs: ArchitectureCosts, executors: int) -> BatchTimes:
    return costs.by_executors[executors]


def _batch_ms(times: Sequence[BatchTimes]) -> Any:
    def batch_ms(expert: int, requests: int) -> float:
        key = expert, requests
        if key not in known:
            known[key] = times[expert].ms_of(requests)
        return known[key]

    known: dict[tuple[int, int], float] = {}
    return batch_ms


def _arriving(paths: Sequence[tuple[int, ...]], times: Sequence[BatchTimes], executors: int) -> list[Way]:
    work_ms = sum(times[expert].ms_of(times[expert].most) / times[expert].most for path in paths for expert in path)
    every_ms = work_ms / executors / len(paths) / ARRIVES_FASTER
    return [Way(number * every_ms, path) for number, path in enumerate(paths)]
