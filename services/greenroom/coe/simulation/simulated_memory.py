"""Memory that holds experts without bytes, behind a link that is shared."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.free_bytes import FreeBytes
from greenroom.experts.deciding.model_residency import ModelResidency
from greenroom.policies.base.expert_policy import ExpertPolicy


class SimulatedLink:
    """Loads one expert after the other, in the order in which they were begun. Loads that ``fails`` names take their
    time and bring nothing.
    """

    def __init__(self, load_ms: Callable[[int], float], fails: Callable[[int], bool] = lambda expert: False) -> None:
        self._load_ms = load_ms
        self._fails = fails
        self._free_ms = 0.0
        self._due: list[tuple[float, int, int, SimulatedMemory]] = []
        self.loads = 0
        self.busy_ms = 0.0

    def begin(self, expert: int, memory: SimulatedMemory, now_ms: float) -> None:
        takes = self._load_ms(expert)
        self._free_ms = max(self._free_ms, now_ms) + takes
        self.loads, self.busy_ms = self.loads + 1, self.busy_ms + takes
        heapq.heappush(self._due, (self._free_ms, self.loads, expert, memory))

    @property
    def next_ms(self) -> float | None:
        """When the next expert comes."""
        return self._due[0][0] if self._due else None

    def deliver(self, now_ms: float) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, _, expert, memory = heapq.heappop(self._due)
            if self._fails(expert):
                memory.failed(expert, "the simulated link has lost it")
            else:
                memory.landed(expert)


class SimulatedMemory(ModelResidency):
    """``nbytes`` of experts under ``policy``. With the ``pieces`` of a pack it decides what a ModelMemory decides.
    Without them whatever is free is of use.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        nbytes: int,
        link: SimulatedLink,
        pieces: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(policy, FreeBytes(nbytes) if pieces is None else ByteArena(nbytes), pieces)
        self.now_ms = 0.0
        self._link = link

    def fill(self, experts: Iterable[int]) -> None:
        """Put these there before anything runs, in this order as far as they fit. The most wanted comes first."""
        self._filled(self._place_first(experts))

    def _begin(self, expert: int, left: Sequence[int], moves: Sequence[Move]) -> None:
        self._link.begin(expert, self, self.now_ms)
