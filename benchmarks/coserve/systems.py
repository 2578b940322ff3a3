"""What is compared: the paper's baselines, CoServe and its ablations, simple systems, and `pull`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.coe.dispatch.early_binding import EarlyBinding, Executor
from greenroom.coe.serving.selection import Selection
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.coserve.scheduling import CoServePlacement
from greenroom.policies.placement.placement_policy import Costs, PendingRequest, Shed
from greenroom.profiling.coe.replayed_throughput import Scheme


@dataclass(frozen=True, slots=True)
class Early:
    """Placed when they arrive, by the paper's scheduling or parts of it. ``ahead``: see ``EarlyBinding``.

    ``deadline_ms``: requests are collected by expert until a batch is full or its first one has waited so long.
    """

    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    assigning: bool = False
    arranging: bool = False
    one_memory: bool = False
    ahead: bool = True
    deadline_ms: float | None = None

    def make_policy(self, catalogue: Catalogue, dependencies: Dependencies) -> ExpertPolicy:
        return Selection(policy=self.policy, policy_options=self.policy_options).make_policy(catalogue, dependencies)

    def make_dispatcher(
        self, names: Sequence[str], memories: Mapping[str, ExpertMemory], costs: Costs, most: Mapping[int, int]
    ) -> Dispatcher:
        placement = CoServePlacement(assigning=self.assigning, arranging=self.arranging)
        executors = [Executor(name, memories[name], costs, most) for name in names]
        inner = EarlyBinding(placement, executors, ahead=self.ahead)
        return inner if self.deadline_ms is None else BatchesByExpert(inner, most, self.deadline_ms)


class BatchesByExpert(Dispatcher):
    """Requests are collected by expert, as servers of single models do. A batch goes to ``inner`` when it is full, or
    when its first request has waited ``deadline_ms``."""

    def __init__(self, inner: Dispatcher, most: Mapping[int, int], deadline_ms: float) -> None:
        self._inner = inner
        self._most = most
        self._deadline_ms = deadline_ms
        self._collected: dict[int, list[PendingRequest]] = {}
        self._since: deque[tuple[float, int, str]] = deque()  # of each batch that was begun, its first request

    @property
    def waiting(self) -> int:
        return self._inner.waiting + sum(map(len, self._collected.values()))

    @property
    def asks_ms(self) -> float | None:
        while self._since and not self._is_collected(*self._since[0][1:]):
            self._since.popleft()
        return self._since[0][0] + self._deadline_ms if self._since else None

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        shed: tuple[Shed, ...] = ()
        for request in requests:
            assert request.expert is not None
            batch = self._collected.setdefault(request.expert, [])
            if not batch:
                self._since.append((now_ms, request.expert, request.request_id))
            batch.append(request)
            if len(batch) >= self._most[request.expert]:
                shed += self._inner.arrived(self._collected.pop(request.expert), now_ms)
        return shed

    def finished(self, executor: str, now_ms: float) -> None:
        self._inner.finished(executor, now_ms)

    def cancel(self, request: PendingRequest) -> bool:
        raise NotImplementedError("replays cancel nothing")

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        raise NotImplementedError("replayed reads do not fail")

    def next_runs(self, now_ms: float) -> list[Run]:
        while (due := self.asks_ms) is not None and due <= now_ms:
            _, expert, _ = self._since.popleft()
            self._inner.arrived(self._collected.pop(expert), now_ms)
        return self._inner.next_runs(now_ms)

    def _is_collected(self, expert: int, first: str) -> bool:
        batch = self._collected.get(expert)
        return batch is not None and batch[0].request_id == first


@dataclass(frozen=True, slots=True)
class System:
    """``executors``: None, as many as the profile finds. ``expert_share``: None, as the profile finds it.
    ``torch``: experts are loaded by `from_pretrained`, when their turn has come."""

    name: str
    scheme: Scheme
    executors: int | None = None
    expert_share: float | None = None
    torch: bool = False


SAMBA: Final = "Samba-CoE"
SAMBA_TORCH: Final = "Samba-CoE, own loading"
OURS: Final = "pull"
COSERVE: Final = Early("coserve", assigning=True, arranging=True)
PULL: Final = Selection("pull")
DEADLINES_MS: Final = (500.0, 2000.0, 8000.0)


def _samba(suffix: str, policy: str, executors: int | None) -> list[System]:
    return [
        System(f"Samba-CoE{suffix}", Early(policy), executors),
        System(f"Samba-CoE{suffix}, own loading", Early(policy, ahead=False), executors, torch=True),
    ]


PAPERS: Final = (
    *_samba("", "lru", 1),
    *_samba(" FIFO", "fifo", 1),
    *_samba(" Parallel", "lru", None),
    System("CoServe None", Early("fifo")),
    System("CoServe EM", Early("coserve")),
    System("CoServe EM+RA", Early("coserve", arranging=True)),
    System("CoServe", COSERVE),
    System("CoServe Casual", COSERVE, 3, 0.75),
    System("CoServe, as printed", Early("coserve", {"literal": True}, assigning=True, arranging=True)),
)
BATCHING: Final = tuple(
    System(f"batches by expert, {deadline / 1000:g} s", Early("lru", one_memory=True, deadline_ms=deadline))
    for deadline in DEADLINES_MS
)
ONE_MEMORY: Final = (
    System("one memory, LRU", Early("lru", arranging=True, one_memory=True)),
    System("one memory, LRU, assigned", Early("lru", assigning=True, arranging=True, one_memory=True)),
)
"""Requests of an expert lie together, and the next expert is loaded while one is computed."""
PULLED: Final = (System("pull, LRU", Selection("pull", "lru")), System(OURS, PULL))
EVERY_SYSTEM: Final = (*PAPERS, *BATCHING, *ONE_MEMORY, *PULLED)
SIMPLE: Final = tuple(system.name for system in (*BATCHING, *ONE_MEMORY))
MATCHED: Final = tuple(system.name for system in PAPERS if system.executors is None)
"""Those that have CoServe's executors and memory, as in the paper."""
