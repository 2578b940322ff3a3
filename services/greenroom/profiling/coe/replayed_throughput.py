"""Requests a second against executors and experts in memory: the dispatchers on a virtual clock, with measured costs.

CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), sections 4.4 and 5 (Figs 17 and 18).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from greenroom.coe.computing.batch_size import batch_size, bytes_of_batch
from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory
from greenroom.coe.dispatch.first_fill import dealt
from greenroom.coe.graph.expert_graph import ExpertGraph, Shares
from greenroom.coe.serving.selection import Selection
from greenroom.coe.simulation.simulate import Served, Way, simulate
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.core.coe_profile import ArchitectureCosts, BatchTimes
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import Costs

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


class Scheme(Protocol):
    """How requests get to executors, and who leaves memory; a ``Selection`` is one."""

    @property
    def one_memory(self) -> bool:
        """Of all executors; else each has its own."""
        ...

    def make_policy(self, catalogue: Catalogue, dependencies: Dependencies) -> ExpertPolicy:
        """One for each memory."""
        ...

    def make_dispatcher(
        self, names: Sequence[str], memories: Mapping[str, ExpertMemory], costs: Costs, most: Mapping[int, int]
    ) -> Dispatcher: ...


def replay(
    board: Board,
    scheme: str | Scheme,
    executors: int,
    memory_bytes: int,
    expert_bytes: int,
    *,
    load_ms: Sequence[float] | None = None,
    ways: Sequence[Way] | None = None,
) -> Served | None:
    """A burst of the board's requests on so many executors, of whose memory experts get ``expert_bytes``.

    ``scheme``: or the name of a scheduling, with the policy that goes with it. ``load_ms[N]``: in place of what the
    board's costs say. ``ways``: in place of a burst of the board's requests.

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
    loads = [costs.load_ms for costs in board.costs] if load_ms is None else load_ms
    link = SimulatedLink(loads.__getitem__)
    chosen = Selection(scheme) if isinstance(scheme, str) else scheme
    dispatcher, memories = assembled(board, chosen, executors, expert_bytes, link, times, most, loads)
    return simulate(
        dispatcher, memories, link, batch_ms_of(times), burst_of(board, executors) if ways is None else ways
    )


def assembled(
    board: Board,
    scheme: Scheme,
    executors: int,
    expert_bytes: int,
    link: SimulatedLink,
    times: Sequence[BatchTimes],
    most: Mapping[int, int],
    load_ms: Sequence[float],
) -> tuple[Dispatcher, list[SimulatedMemory]]:
    """Memories are filled by descending probability, dealt in turn until nothing fits (section 4.1)."""
    catalogue = Catalogue.of_models("replayed", board.bytes_of)
    dependencies = Dependencies(board.usage, board.graph.predecessors)
    names = [f"executor {number}" for number in range(executors)]
    budgets = [expert_bytes // parts for parts in ([1] if scheme.one_memory else [executors] * executors)]
    memories = [SimulatedMemory(scheme.make_policy(catalogue, dependencies), budget, link) for budget in budgets]
    for memory, first in zip(memories, dealt(board.usage, board.bytes_of, budgets), strict=True):
        memory.fill(first)
    costs = Costs(
        load_ms_by_expert=dict(enumerate(load_ms)),
        request_ms_by_expert={expert: one.request_ms for expert, one in enumerate(times)},
        batch_ms_by_expert={expert: one.batch_ms for expert, one in enumerate(times)},
    )
    own = {name: memories[place % len(memories)] for place, name in enumerate(names)}
    return scheme.make_dispatcher(names, own, costs, most), memories


def _times(costs: ArchitectureCosts, executors: int) -> BatchTimes:
    return costs.by_executors[executors]


def batch_ms_of(times: Sequence[BatchTimes]) -> Callable[[int, int], float]:
    """What a batch of an expert's requests takes; ``times[N]``: of the experts."""

    def batch_ms(expert: int, requests: int) -> float:
        key = expert, requests
        if key not in known:
            known[key] = times[expert].ms_of(requests)
        return known[key]

    known: dict[tuple[int, int], float] = {}
    return batch_ms


def burst_of(board: Board, executors: int, faster: float = ARRIVES_FASTER) -> list[Way]:
    """The board's requests, ``faster`` as fast as so many executors could compute them."""
    times = [_times(costs, executors) for costs in board.costs]
    work_ms = sum(
        times[expert].ms_of(times[expert].most) / times[expert].most for path in board.paths for expert in path
    )
    every_ms = work_ms / executors / len(board.paths) / faster
    return [Way(number * every_ms, path) for number, path in enumerate(board.paths)]
