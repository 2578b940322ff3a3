"""Which waiting request goes to which worker: the placement policy decides, suspects first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from greenroom.core.generation import FinishReason
from greenroom.policies.placement.latency_estimate import ESTIMATORS, latency_ms
from greenroom.policies.placement.placement_policy import (
    PendingRequest,
    Placement,
    PlacementPolicy,
    PlacementState,
    WorkerView,
)
from greenroom.scheduler.effects import Effect
from greenroom.scheduler.lost_workers import suspect
from greenroom.scheduler.outcomes import end
from greenroom.scheduler.pool_state import PoolState, Role

_SHED: Mapping[str, str] = {
    "expired": "its deadline passed while it waited",
    "unservable": "it needs more KV memory than any worker has",
    "saturated": "there is no room for it",
}


def dispatch(pool: PoolState, policy: PlacementPolicy, now: float) -> list[Effect]:
    """Place the requests that wait, where there is room."""
    if pool.role is not Role.ACTIVE or not pool.waiting:
        return []
    effects = _place_suspects(pool, now)
    waiting = tuple([  # a list, since it is the faster of the two and there may be a thousand
        entry.pending
        for entry in pool.waiting.values()
        if entry.pending is not None and (not (entry.losses or entry.unsure) or not suspect(pool, entry))
    ])  # fmt: skip
    views = tuple(worker.view(now) for worker in pool.workers.values() if worker.takes(now) and not worker.reserved)
    if not waiting:
        return effects
    decision = policy.decide(PlacementState(waiting, views), now)
    largest = _most_kv(pool)
    for shed in decision.shed:
        entry = pool.waiting[shed.request_id]
        if shed.reason == "unservable" and entry.pending is not None and entry.pending.kv_most <= largest:
            continue  # too large only for the workers that can take something now
        reason = FinishReason.EXPIRED if shed.reason == "expired" else FinishReason.SHED
        effects += end(pool, entry, reason, now, message=_SHED.get(shed.reason, shed.reason))
    estimates = _estimates_ms(waiting, views, decision.place, now)
    for placement in decision.place:
        entry = pool.waiting[placement.request_id]
        effects += pool.place(entry, pool.workers[placement.worker], now)
        entry.estimates_ms = estimates[placement.request_id]
    return effects


def _most_kv(pool: PoolState) -> int:
    """Tokens of KV memory of the worker that has the most."""
    return max((worker.capacity.kv_tokens for worker in pool.workers.values()), default=0)


def _place_suspects(pool: PoolState, now: float) -> list[Effect]:
    """Rule 5: a suspect runs alone. One worker at a time is emptied for it.

    It has the memory for what the suspect may need, where any worker has: a smaller one would refuse it for good.
    """
    largest = _most_kv(pool)
    for worker in pool.workers.values():
        worker.reserved = False
    effects: list[Effect] = []
    suspects = [entry for entry in pool.waiting.values() if (entry.losses or entry.unsure) and suspect(pool, entry)]
    for entry in suspects:
        usable = [worker for worker in pool.workers.values() if worker.takes(now) and not worker.reserved]
        if not usable:
            break
        needed = 0 if entry.pending is None else min(entry.pending.kv_most, largest)
        usable = [worker for worker in usable if worker.capacity.kv_tokens >= needed]
        if not usable:
            continue  # it waits for a larger one
        worker = min(usable, key=lambda worker: (len(worker.placed), worker.name))
        if worker.placed:
            worker.reserved = True
            break
        worker.alone = entry.request_id
        pool.count("placed_alone")
        effects += pool.place(entry, worker, now)
    return effects


def _estimates_ms(
    waiting: Iterable[PendingRequest], views: Iterable[WorkerView], place: Collection[Placement], now: float
) -> dict[str, dict[str, float]]:
    """By request and estimator, in the order of placement. Empty where the worker's costs are unknown."""
    requests = {request.request_id: request for request in waiting} if place else {}
    workers = {view.worker: view for view in views}
    joined: dict[str, list[PendingRequest]] = {}
    found: dict[str, dict[str, float]] = {}
    for placement in place:
        view, request = workers[placement.worker], requests[placement.request_id]
        before = joined.setdefault(placement.worker, [])
        known = ESTIMATORS if view.costs.generated_ms(1) > 0 else {}
        found[request.request_id] = {
            name: latency_ms(estimator, view, before, request, now) for name, estimator in known.items()
        }
        before.append(request)
    return found
