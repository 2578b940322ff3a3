"""The workers of a pool, as its scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core.attempts import Attempt
from greenroom.policies.base.answer_lengths import expected_length
from greenroom.policies.placement.latency_estimate import expected_left
from greenroom.policies.placement.placement_policy import Costs, PlacedRequest, QueuedGroup, WorkerView
from greenroom.scheduler.request_entries import Entry

_ONE_MORE_MS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a worker says it can hold. KV in tokens."""

    max_running: int
    max_queued: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker says of itself with every beat. ``generated``: tokens so far, by request. ``missing``: the share of
    the experts that are not on its device. ``experts``: how many its model has, all layers together; 0: it does not
    say. ``model``: the name that it serves. ``executing``: the requests that are being executed, of a worker that has
    many and arranges them itself; None: every request that it has may be."""

    draining: bool = False
    costs: Costs = field(default_factory=Costs)
    generated: dict[str, int] = field(default_factory=dict)
    missing: float = 0.0
    experts: int = 0
    model: str = ""
    executing: frozenset[str] | None = None


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One worker of the pool. ``lease_until``: it may emit until then at the latest, by the scheduler's clock.

    ``listed``: it has said what it runs since it was last reached. ``blocked_until``: nothing is placed on it before,
    since it refused a run. ``full``: how many it had when it last said that it has no room, and when. ``alone``: the
    request that it runs alone. ``reserved``: it is being emptied for a request that must run alone. ``heard_ms``: when
    it said ``state``. ``costs``: its costs as policies are told.
    """

    name: str
    capacity: Capacity
    lease_until: float
    listed: bool = False
    state: WorkerState = WorkerState()
    heard_ms: float = 0.0
    costs: Costs = field(default_factory=Costs)
    placed: dict[str, Entry] = field(default_factory=dict)
    blocked_until: float = 0.0
    full: tuple[int, float] | None = None
    alone: str | None = None
    reserved: bool = False
    unclaimed: dict[str, Attempt] = field(default_factory=dict)
    """Runs of requests whose tasks have not been read yet."""

    def takes(self, now: float) -> bool:
        """Whether a request may be placed here."""
        return self.listed and not self.state.draining and now >= self.blocked_until and self.alone is None

    def view(self, now: float) -> WorkerView:
        """The worker as a policy sees it: its last ``state``, plus a token for each step that there was time for since.
        Without these tokens the view would be some hundred milliseconds old, as long as a short answer takes."""
        if self.state.executing is not None:
            return self._view_of_many(now)
        running: list[PlacedRequest] = []
        kv_used = 0
        rows = min(len(self.placed), self.capacity.max_running)
        unread = [tokens for tokens in self._unread() if tokens]
        step_ms = rows * self.costs.generated_ms(rows)
        generating = sum(1 for tokens in self.state.generated.values() if tokens > 0)
        reading_ms = self.costs.read_all_ms(sum(unread), rows, min(rows, generating))
        for entry in self.placed.values():
            request = entry.pending
            if request is None:
                continue
            first = request.kv_need - request.input_tokens + 1
            most = first if request.most_tokens is None else request.most_tokens
            since = max(self.heard_ms, entry.placed_ms) + reading_ms
            steps = int(max(0.0, now - since) / step_ms) if step_ms > 0 else 0
            generated = max(0, min(self.state.generated.get(entry.request_id, 0) + steps, most - 1))
            kv_used += request.input_tokens + expected_length(first, generated, most) - 1
            left = expected_left(request.expected_tokens, generated, most - generated)
            running.append(PlacedRequest(request, entry.placed_ms, generated, left))
        free = max(0, self.capacity.kv_tokens - kv_used)
        return WorkerView(
            worker=self.name,
            running=tuple(running[: self.capacity.max_running]),
            queued=tuple(placed.request for placed in running[self.capacity.max_running :]),
            max_running=self.capacity.max_running,
            max_queued=self.capacity.max_queued,
            kv_total=self.capacity.kv_tokens,
            kv_free=free,
            costs=self.costs,
        )

    def _view_of_many(self, now: float) -> WorkerView:
        """It arranges its requests itself, and has thousands. So a policy is told how many they are, and no more.

        Their inputs may take all its room before its places are taken. Each that is sent in vain costs as much as its
        inputs, so after a refusal as many are tried as it had then, and one more for every ``_ONE_MORE_MS`` since."""
        count = len(self.placed)
        most_running, most_queued = self.capacity.max_running, self.capacity.max_queued
        if self.full is not None:
            had, since = self.full
            tried = had + 1 + int(max(0.0, now - since) / _ONE_MORE_MS)
            most_running, most_queued = min(most_running, tried), min(most_queued, max(0, tried - most_running))
        return WorkerView(
            worker=self.name,
            running=(),
            queued=(),
            max_running=most_running,
            max_queued=most_queued,
            kv_total=self.capacity.kv_tokens,
            kv_free=self.capacity.kv_tokens,
            costs=self.costs,
            groups=(QueuedGroup(None, count),) if count else (),
        )

    def _unread(self) -> list[int]:
        """Input tokens of each request that had generated nothing when the worker last spoke. Reading them comes
        first."""
        return [
            entry.pending.input_tokens
            for entry in self.placed.values()
            if entry.pending is not None and not self.state.generated.get(entry.request_id)
        ]
