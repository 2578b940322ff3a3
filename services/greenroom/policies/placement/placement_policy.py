"""PlacementPolicy decides which request goes to which worker or executor, and where in its queue.

A pure function of state and ``now_ms``, run by the scheduler at every arrival and completion, and within a process
for the executors of a graph of whole models (CoE). Times are milliseconds on one clock of the caller's choice.
"""

from __future__ import annotations

import itertools
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from greenroom.core.step_costs import Figures, StepCosts
from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import UNKNOWN_TASK


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that is on no worker yet, or one stage of it.

    ``kv_need``: what it is expected to hold at its end (same unit as the worker's). ``most_tokens``: as many as it may
    generate; None: as many as ``kv_need`` leaves. SLOs count from ``arrived_ms``; None: not given.
    ``expert``: in a graph of models, the one that serves this stage. A finished stage comes back as a new pending
    request of the same ``request_id`` with a higher ``stage``. ``tenant``: its owner; "" is one like any other.

    ``packed``: its figures in the order of ``COLUMNS``. Joining them makes one array of a thousand requests in
    microseconds.
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
    most_tokens: int | None = None
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
            min(self.kv_most, _MOST_TOKENS),
        )
        object.__setattr__(self, "packed", packed)

    @property
    def kv_most(self) -> int:
        """What it may hold at its end. A worker whose memory is smaller in all can not serve it."""
        return self.kv_need if self.most_tokens is None else self.input_tokens + self.most_tokens - 1


COLUMNS = (
    "arrived_ms",
    "input_tokens",
    "kv_need",
    "expected_tokens",
    "deadline_ms",
    "slo_ttft_ms",
    "slo_e2e_ms",
    "priority",
    "kv_most",
)
"""The figures in ``PendingRequest.packed``, a float64 each. An SLO that is not given is infinite."""
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
    """What a worker's work takes, as profiled, in milliseconds.

    ``token_ms``: generating a token (eMoE's c; CoServe's K for a request). ``token_ms_by_rows[b - 1]``: the same
    while b requests generate, where known. ``prefill_token_ms``: reading a token of a prompt, where known. ``steps``:
    what a step takes by its rows, where steps with prompts were measured. ``batch_ms``: a batch, whatever its size
    (CoServe's B). ``load_ms_by_task``: loading the experts that a request of the task brings with it (eMoE's ΔE).
    ``load_ms_by_expert``: loading one model, by key. ``request_ms_by_expert`` and ``batch_ms_by_expert``: CoServe's K
    and B of a model, by key, where models differ.
    """

    token_ms: float = 0.0
    batch_ms: float = 0.0
    load_ms_by_task: Mapping[str, float] = field(default_factory=dict)
    load_ms_by_expert: Mapping[int, float] = field(default_factory=dict)
    token_ms_by_rows: tuple[float, ...] = ()
    prefill_token_ms: float | None = None
    request_ms_by_expert: Mapping[int, float] = field(default_factory=dict)
    batch_ms_by_expert: Mapping[int, float] = field(default_factory=dict)
    steps: StepCosts | None = None

    def request_ms(self, expert: int | None) -> float:
        """A request more in a batch of this model (CoServe's K)."""
        return self.token_ms if expert is None else self.request_ms_by_expert.get(expert, self.token_ms)

    def batch_ms_of(self, expert: int | None) -> float:
        """A batch of this model, whatever its size (CoServe's B)."""
        return self.batch_ms if expert is None else self.batch_ms_by_expert.get(expert, self.batch_ms)

    def load_ms(self, expert: int | None) -> float:
        """Loading this model."""
        return 0.0 if expert is None else self.load_ms_by_expert.get(expert, 0.0)

    def generated_ms(self, rows: int) -> float:
        """A token while ``rows`` requests generate. More rows than were profiled count as the most profiled."""
        known = self.token_ms_by_rows
        return known[min(max(rows, 1), len(known)) - 1] if known else self.token_ms

    def read_ms(self, rows: int) -> float:
        """A token of a prompt, read while ``rows`` requests generate."""
        return self.generated_ms(rows) if self.prefill_token_ms is None else self.prefill_token_ms

    def reading_ms(self, tokens: Figures, rows: int, generating: int) -> Figures:
        """So many tokens of prompts, read together while ``rows`` requests are there, of which ``generating`` generate:
        what that makes the steps of these longer, where steps were measured, else ``read_ms`` for each token."""
        return tokens * self.read_ms(rows) if self.steps is None else self.steps.reading_ms(tokens, generating)

    def read_all_ms(self, tokens: int, rows: int, generating: int) -> float:
        """``reading_ms`` of one number of tokens."""
        return float(self.reading_ms(np.array([float(tokens)]), rows, generating)[0])


class QueuedGroup(NamedTuple):
    """Requests of one expert that lie side by side in a queue."""

    expert: int | None
    requests: int


@dataclass(frozen=True, slots=True, eq=False)
class WorkerView:
    """One worker or executor, as the caller last heard of it.

    ``running`` and ``queued`` (in its own order) are what was placed there. ``max_running`` and ``kv_free`` are
    what it can still be given: the policy must exceed neither. ``resident``: experts it holds, where whole
    models are placed. ``groups``: in place of ``queued`` where that may be long, its groups in its order. ``busy_ms``:
    predicted until what it runs and loads now is done, where the caller knows.
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
    groups: tuple[QueuedGroup, ...] = ()
    busy_ms: float = 0.0

    @property
    def queue_groups(self) -> tuple[QueuedGroup, ...]:
        """Of the whole queue."""
        return self.groups or tuple(
            QueuedGroup(expert, len(list(group)))
            for expert, group in itertools.groupby(self.queued, key=lambda request: request.expert)
        )

    @property
    def queue_length(self) -> int:
        return sum([requests for _, requests in self.groups]) if self.groups else len(self.queued)


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

    ``needs_groups``: False where only the length of a queue matters; ``groups`` then may be any that add up to it.
    """

    needs_groups: bool = True

    @abstractmethod
    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        """Where to put what waits. Changes nothing in ``state``."""
