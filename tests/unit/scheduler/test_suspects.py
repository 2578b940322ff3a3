"""A request that must run alone gets an empty worker, however many others keep coming."""

from __future__ import annotations

import random

import pytest

from greenroom.policies.placement.placement_policy import PendingRequest
from greenroom.policies.registry import create_placement_policy
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.dispatch import dispatch
from greenroom.scheduler.pool_state import PoolState, Role
from greenroom.scheduler.pool_workers import Capacity, PoolWorker, WorkerState
from greenroom.scheduler.request_entries import Entry

PLACES = 40


def arrive(pool: PoolState, number: int, losses: int = 0) -> Entry:
    pending = PendingRequest(str(number), float(number), 1, 1, 1, deadline_ms=1e15)
    entry = Entry(str(number), number, pending=pending)
    entry.losses.update(range(losses))  # type: ignore[arg-type]
    pool.waiting[entry.request_id] = entry
    return entry


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_suspect_is_placed_under_load_that_never_ends(
    workers: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step more come than end, and those that end are drawn from all workers."""
    lots = random.Random(seed)
    pool = PoolState("s", PoolConfig())
    pool.role = Role.ACTIVE
    monkeypatch.setattr(PoolState, "run", lambda pool, entry, worker: [])
    for at in range(workers):
        capacity = Capacity(max_running=PLACES, max_queued=0, kv_tokens=1000)
        pool.workers[f"w{at}"] = PoolWorker(
            f"w{at}", capacity, 1e15, listed=True, state=WorkerState(executing=frozenset())
        )
    policy = create_placement_policy("fcfs")
    for number in range(workers * PLACES):
        arrive(pool, number)
    dispatch(pool, policy, 0.0)
    assert "placed_alone" not in pool.counts
    suspect = arrive(pool, 10_000, losses=pool.config.alone_after)
    for step in range(workers * PLACES + 1):
        for more in range(3):
            arrive(pool, 20_000 + 3 * step + more)
        dispatch(pool, policy, 0.0)
        if suspect.worker is not None:
            break
        for worker in pool.workers.values():
            if worker.placed:
                pool.unplace(worker.placed[lots.choice(list(worker.placed))])
    assert suspect.worker is not None
    assert list(pool.workers[suspect.worker].placed) == ["10000"]
    assert pool.counts["placed_alone"] == 1


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize(("most", "chosen"), [(10, "small"), (900, "large"), (5000, "large")])
def test_a_suspect_is_not_given_to_a_worker_that_is_too_small_while_there_is_a_larger_one(
    most: int, chosen: str, draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small one would refuse it, and a request ends with that. Where none is large enough the largest says so."""
    pool = PoolState("s", PoolConfig())
    pool.role = Role.ACTIVE
    monkeypatch.setattr(PoolState, "run", lambda pool, entry, worker: [])
    for name, tokens in (("small", 100), ("large", 1000)):
        capacity = Capacity(max_running=4, max_queued=0, kv_tokens=tokens)
        pool.workers[name] = PoolWorker(name, capacity, 1e15, listed=True)
    pool.workers["large"].state = WorkerState(draining=draining)
    busy = arrive(pool, 1)
    pool.place(busy, pool.workers["large"], 0.0)
    suspect = arrive(pool, 2, losses=pool.config.alone_after)
    suspect.pending = PendingRequest("2", 2.0, 1, 1, 1, deadline_ms=1e15, most_tokens=most)
    policy = create_placement_policy("fcfs")
    dispatch(pool, policy, 0.0)
    assert suspect.worker == ("small" if chosen == "small" else None)
    pool.unplace(busy)
    pool.workers["large"].state = WorkerState()
    dispatch(pool, policy, 0.0)
    assert suspect.worker == chosen
