"""PlacementPolicy decides which request goes to which worker or executor, and where in its queue.

A pure function of state and ``now_ms``, run by the scheduler at every arrival and completion, and within a process
for the executors of a graph of whole models (CoE). Times are milliseconds on one clock of the caller's choice.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import UNKNOWN_TASK


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that is on no worker yet, or one stage of it.

    ``kv_need``: what it reserves (same unit as the worker's). SLOs count from ``arrived_ms``; None is none given.
    ``expert``: in a graph of models the one that serves this stage. A finished stage comes back as a new pending
    request of the same ``request_id`` with a higher ``stage``. ``tenant``: whose it is; "" is one like any other.

    ``packed``: its figures in ``COLUMNS``' order, so that the figures of a thousand are one array in microseconds.
    """

    request_id: str
    arrived_ms: float
    input_tokens: int
    kv_need: int
    expected_tokens: int
    deadline_ms: float
    task: str = UNKNOWN_TASK
    slo_ttft_ms: float | None = None
    slo_e2e_ms: float | None = None
    priority: int = 0
    expert: int | None = None
    stage: int = 0
    tenant: str = ""
    packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed = _PACKED.pack(
            self.arrived_ms,
            min(self.input_tokens, _MOST_TOKENS),
            min(self.kv_need, _MOST_TOKENS),
            min(self.expected_tokens, _MOST_TOKENS),
            self.deadline_ms,
            _limit(self.slo_ttft_ms),
            _limit(self.slo_e2e_ms),
            self.priority,
        )
        object.__setattr__(self, "packed", packed)


COLUMNS = (
    "arrived_ms",
    "input_tokens",
    "kv_need",
    "expected_tokens",
    "deadline_ms",
    "slo_ttft_ms",
    "slo_e2e_ms",
    "priority",
)
"""Of ``PendingRequest.packed``, a float64 each. An SLO that is not given is infinite."""
_PACKED = struct.Struct(f"={len(COLUMNS)}d")
_MOST_TOKENS = 2**52


def _limit(slo_ms: float | None) -> float:
    return math.inf if slo_ms is None or math.isnan(slo_ms) else slo_ms


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request on a worker. ``expected_left``: tokens it is still expected to generate (eMoE's G, Eq. 3)."""

    request: PendingRequest
    started_ms: float
    generated_tokens: int
    expected_left: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What was profiled of a worker: milliseconds.

    ``token_ms``: a token (eMoE's c; CoServe's K for a request); ``token_ms_by_rows[b - 1]``: where b requests generate,
    ``prefill_token_ms``: of a prompt, where these are known. ``batch_ms``: a batch, whatever its size (CoServe's B).
    ``load_ms``: loading the experts that a request of a task brings with it (eMoE's ΔE), or one model by key.
    """

    token_ms: float = 0.0
    batch_ms: float = 0.0
    load_ms_by_task: Mapping[str, float] = field(default_factory=dict)
    load_ms_by_expert: Mapping[int, float] = field(default_factory=dict)
    token_ms_by_rows: tuple[float, ...] = ()
    prefill_token_ms: float | None = None

    def generated_ms(self, rows: int) -> float:
        """A token where ``rows`` requests generate; beyond those that are known as with the most of them."""
        known = self.token_ms_by_rows
        return known[min(max(rows, 1), len(known)) - 1] if known else self.token_ms

    def read_ms(self, rows: int) -> float:
        """A token of a prompt that is read beside them."""
        return self.generated_ms(rows) if self.prefill_token_ms is None else self.prefill_token_ms


@dataclass(frozen=True, slots=True, eq=False)
class WorkerView:
    """One worker or executor, as the caller last heard of it.

    ``running`` and ``queued`` (in its own order) are what was placed there. ``max_running`` and ``kv_free`` are
    what it can still be given: the policy must exceed neither. ``resident``: experts it holds, where whole
    models are placed.
    """

    worker: str
    running: tuple[PlacedRequest, ...]
    queued: tuple[PendingRequest, ...]
    max_running: int
    max_queued: int
    kv_total: int
    kv_free: int
    costs: Costs = Costs()
    resident: Keys = field(default_factory=lambda: NO_KEYS)


@dataclass(frozen=True, slots=True)
class PlacementState:
    """``pending`` in order of arrival; ``workers`` are those that are alive and may be given work."""

    pending: tuple[PendingRequest, ...]
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """``request_id`` goes to ``worker``, before position ``position`` of its queue (None: at the end)."""

    request_id: str
    worker: str
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Shed:
    """A pending request that is given up, and why (``saturated``, ``expired``, ``unservable``)."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """To be carried out in order; requests that are in neither list stay pending."""

    place: tuple[Placement, ...] = ()
    shed: tuple[Shed, ...] = ()


class PlacementPolicy(ABC):
    """Invariants for every policy: no worker gets more than it has room for; no request is placed or shed twice;
    a pending request past its deadline is shed; equal states and times give equal decisions.
    """

    @abstractmethod
    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        """Where to put what waits. Changes nothing in ``state``."""


class _InOrder(PlacementPolicy):
    """One after the other in ``ordered``'s order, to the worker with the fewest requests (ties: most free KV, then its
    name).

    The head of the queue blocks, as in FcfsBatching and for the same reason. Expired requests are shed, and those
    that are larger than every worker's whole KV memory are unservable, so neither blocks anyone. Without a worker
    everything else stays pending.
    """

    @abstractmethod
    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        """What is pending, in the order in which it is to be served."""

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        place: list[Placement] = []
        shed: list[Shed] = []
        load = {w.worker: len(w.running) + len(w.queued) for w in state.workers}
        kv_free = {w.worker: w.kv_free for w in state.workers}
        room = {w.worker: w.max_running + w.max_queued - load[w.worker] for w in state.workers}
        largest = max((w.kv_total for w in state.workers), default=None)
        blocked = False
        for request in self.ordered(state):
            if now_ms >= request.deadline_ms:
                shed.append(Shed(request.request_id, "expired"))
            elif largest is not None and request.kv_need > largest:
                shed.append(Shed(request.request_id, "unservable"))
            elif not blocked:
                able = [w.worker for w in state.workers if room[w.worker] > 0 and request.kv_need <= kv_free[w.worker]]
                if not able:
                    blocked = True
                    continue
                chosen = min(able, key=lambda name: (load[name], -kv_free[name], name))
                place.append(Placement(request.request_id, chosen))
                load[chosen] += 1
                room[chosen] -= 1
                kv_free[chosen] -= request.kv_need
        return PlacementDecision(place=tuple(place), shed=tuple(shed))


class FcfsPlacement(_InOrder):
    """First come first served, tenants in turns: who has least on the workers is next, of several who came first.

    So one that sends a hundred at once waits behind its own, and each of k tenants that wait has a k-th of the places
    once those that were placed before have ended. Of one tenant's requests none overtakes another. Whoever has nothing
    on a worker has nobody before its first request but first requests that came earlier, so nobody starves. With one
    tenant it is the order of arrival.
    """

    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        pending = state.pending
        if all(request.tenant == pending[0].tenant for request in pending):
            return pending
        taken = Counter(placed.request.tenant for worker in state.workers for placed in worker.running)
        taken.update(queued.tenant for worker in state.workers for queued in worker.queued)
        turns: list[int] = []
        for request in pending:
            turns.append(taken[request.tenant])
            taken[request.tenant] += 1
        return [pending[place] for place in sorted(range(len(pending)), key=turns.__getitem__)]


class EdfPlacement(_InOrder):
    """Earliest deadline first: higher ``priority`` before lower, then by when the request is wanted, the earliest of
    its SLOs (to the first token, to the end) and its deadline; ties in order of arrival.

    Optimal on one server where all deadlines can be met (Liu and Layland, JACM 1973, §7). Where they can not, it serves
    what is late already before what could still be in time; and a request without SLOs waits behind all that have
    some, at most until its deadline or the queue's bound.
    """

    def ordered(self, state: PlacementState) -> Sequence[PendingRequest]:
        return sorted(state.pending, key=lambda request: (-request.priority, wanted_at_ms(request)))


def wanted_at_ms(request: PendingRequest) -> float:
    """When the first of its SLOs, or else its deadline, is over."""
    slos = (slo for slo in (request.slo_ttft_ms, request.slo_e2e_ms) if slo is not None)
    return min((request.arrived_ms + slo for slo in slos), default=request.deadline_ms)
