"""Memory that holds experts without bytes, behind a link that is shared."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import (
    LayerRouting,
    Phase,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import PendingRequest

_DECODE = np.array([Phase.DECODE], dtype=np.uint8)


class SimulatedLink:
    """Loads one expert after the other, in the order in which they were begun."""

    def __init__(self, load_ms: Callable[[int], float]) -> None:
        self._load_ms = load_ms
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
            memory.landed(expert)


class SimulatedMemory:
    """``nbytes`` of experts under ``policy``. Whatever is free is of use, as in a ByteArena where all may move."""

    def __init__(self, policy: ExpertPolicy, nbytes: int, link: SimulatedLink) -> None:
        self.policy = policy
        self.now_ms = 0.0
        self._bytes_of = policy.catalogue.bytes_of
        self._free = nbytes
        self._link = link
        self._there = np.zeros(policy.catalogue.size, dtype=np.bool_)
        self._held: Counter[int] = Counter()
        self._coming: set[int] = set()
        self._waited_for: Counter[int] = Counter()
        self._sequences: dict[tuple[str, int], int] = {}
        self._steps = 0
        policy.on_budget_changed(Tier.DEVICE, nbytes)

    @property
    def residents(self) -> Keys:
        return np.flatnonzero(self._there)

    @property
    def loading(self) -> int:
        return len(self._coming)

    def has(self, expert: int) -> bool:
        return bool(self._there[expert])

    def fill(self, experts: Sequence[int]) -> None:
        """Put these there before anything runs, as far as they fit."""
        for expert in experts:
            if self._bytes_of[expert] <= self._free:
                self._free -= int(self._bytes_of[expert])
                self._there[expert] = True
                self.policy.on_transfer_done(Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.FILL))

    def waits(self, request: PendingRequest) -> None:
        assert request.expert is not None
        self._sequences[request.request_id, request.stage] = sequence = len(self._sequences)
        self._waited_for[request.expert] += 1
        self.policy.on_sequence_queued(SequenceInfo(sequence, expert=request.expert))

    def hold(self, expert: int, requests: Sequence[PendingRequest]) -> None:
        assert self._there[expert]
        self._held[expert] += 1
        self._waited_for[expert] -= len(requests)
        for request in requests:
            sequence = self._sequences[request.request_id, request.stage]
            self.policy.on_sequence_started(SequenceInfo(sequence, expert=expert))
            self.policy.on_sequence_ended(sequence, SequenceEnd.FINISHED)
        self._steps += 1
        rows = np.zeros(len(requests), dtype=np.int64)
        step = Step(self.policy.catalogue.pool, self._steps, rows, _DECODE.repeat(len(rows)))
        self.policy.on_step_started(step)
        experts, count = np.array([[expert], [len(rows)]], dtype=np.int64)
        self.policy.on_layer_routed(LayerRouting(self.policy.catalogue, step, 0, experts, count))

    def release(self, expert: int) -> None:
        self._held[expert] -= 1
        if not self._held[expert]:
            del self._held[expert]

    def fetch(self, expert: int, *, whoever: bool = True) -> bool:
        if self._there[expert] or expert in self._coming:
            return True
        needed = int(self._bytes_of[expert]) - self._free
        if needed > 0:
            evictable = self._there.copy()
            evictable[list(self._held)] = False
            if not whoever:
                evictable[[key for key, count in self._waited_for.items() if count > 0]] = False
            incoming = np.array([expert], dtype=np.int64)
            request = VictimRequest(Tier.DEVICE, needed, evictable, self._there.copy(), Reason.ON_DEMAND, incoming)
            victims = self.policy.victims(request)
            if not len(victims):
                return False
            self._there[victims] = False
            self._free += int(self._bytes_of[victims].sum())
            self.policy.on_evicted(Tier.DEVICE, victims)
        self._free -= int(self._bytes_of[expert])
        self._coming.add(expert)
        self._link.begin(expert, self, self.now_ms)
        return True

    def landed(self, expert: int) -> None:
        self._coming.discard(expert)
        self._there[expert] = True
        self.policy.on_transfer_done(Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.ON_DEMAND))
