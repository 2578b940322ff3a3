"""The workers of a pool, as its scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core.attempts import Attempt
from greenroom.policies.placement_policy import Costs, PlacedRequest, WorkerView
from greenroom.scheduler.entries import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a worker says that it can hold. KV in tokens."""

    max_running: int
    max_queued: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker says of itself with every beat. ``generated``: tokens so far, by request."""

    draining: bool = False
    costs: Costs = field(default_factory=Costs)
    generated: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Seat:
    """One worker that is there. ``lease_until``: it may emit until then at the latest, by the scheduler's clock.

    ``listed``: it has said what it runs since it was last reached. ``blocked_until``: it refused a run.
    ``alone``: the request that it runs alone. ``reserved``: it empties for one that must.
    """

    worker: str
    capacity: Capacity
    lease_until: float
    listed: bool = False
    state: WorkerState = WorkerState()
    placed: dict[str, Entry] = field(default_factory=dict)
    blocked_until: float = 0.0
    alone: str | None = None
    reserved: bool = False
    unclaimed: dict[str, Attempt] = field(default_factory=dict)
    """Runs of requests whose tasks have not been read yet."""

    def takes(self, now: float) -> bool:
        """Whether anything may be placed here at all."""
        return self.listed and not self.state.draining and now >= self.blocked_until and self.alone is None

    def view(self, now: float) -> WorkerView:
        running: list[PlacedRequest] = []
        kv_used = 0
        for entry in self.placed.values():
            if entry.pending is None:
                continue
            kv_used += entry.pending.kv_need
            generated = self.state.generated.get(entry.request_id, 0)
            left = max(1, entry.pending.expected_tokens - generated)
            running.append(PlacedRequest(entry.pending, entry.placed_ms, generated, left))
        free = max(0, self.capacity.kv_tokens - kv_used)
        return WorkerView(
            worker=self.worker,
            running=tuple(running[: self.capacity.max_running]),
            queued=tuple(placed.request for placed in running[self.capacity.max_running :]),
            max_running=self.capacity.max_running,
            max_queued=self.capacity.max_queued,
            kv_total=self.capacity.kv_tokens,
            kv_free=free,
            costs=self.state.costs,
        )
