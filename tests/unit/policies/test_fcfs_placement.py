"""FCFS placement: to the least loaded worker with room; expired and unservable requests are shed."""

from __future__ import annotations

from greenroom.policies.placement_policy import (
    FcfsPlacement,
    PendingRequest,
    PlacedRequest,
    Placement,
    PlacementDecision,
    PlacementState,
    Shed,
    WorkerView,
)


def pending(name: str, *, kv_need: int = 10, deadline_ms: float = 1000.0) -> PendingRequest:
    return PendingRequest(
        name, arrived_ms=0.0, input_tokens=5, kv_need=kv_need, expected_tokens=5, deadline_ms=deadline_ms
    )


def worker(
    name: str, *, running: int = 0, queued: int = 0, kv_free: int = 100, max_running: int = 4, max_queued: int = 0
) -> WorkerView:
    return WorkerView(
        name,
        running=tuple(PlacedRequest(pending(f"{name}-r{n}"), 0.0, 0, 5) for n in range(running)),
        queued=tuple(pending(f"{name}-q{n}") for n in range(queued)),
        max_running=max_running,
        max_queued=max_queued,
        kv_total=100,
        kv_free=kv_free,
    )


def decide(requests: list[PendingRequest], workers: list[WorkerView], now_ms: float = 0.0) -> PlacementDecision:
    return FcfsPlacement().decide(PlacementState(tuple(requests), tuple(workers)), now_ms)


def test_the_worker_with_the_fewest_requests_gets_the_next() -> None:
    decision = decide([pending(n) for n in "abc"], [worker("w1", running=2), worker("w2")])

    assert decision.place == (Placement("a", "w2"), Placement("b", "w2"), Placement("c", "w1"))


def test_of_equally_loaded_workers_the_one_with_more_free_kv_then_the_first_by_name() -> None:
    assert decide([pending("a")], [worker("w1", kv_free=50), worker("w2", kv_free=60)]).place[0].worker == "w2"
    assert decide([pending("a")], [worker("w2"), worker("w1")]).place[0].worker == "w1"


def test_room_counts_running_and_queued() -> None:
    full = worker("w", running=2, queued=1, max_running=2, max_queued=2)

    decision = decide([pending("a"), pending("b")], [full])

    assert decision.place == (Placement("a", "w"),)
    assert decision.shed == ()


def test_the_head_of_the_queue_blocks() -> None:
    decision = decide([pending("large", kv_need=60), pending("small", kv_need=1)], [worker("w", kv_free=50)])

    assert decision == PlacementDecision()


def test_expired_and_unservable_requests_are_shed_and_block_no_one() -> None:
    requests = [pending("late", deadline_ms=10), pending("huge", kv_need=101), pending("fine", deadline_ms=11)]

    decision = decide(requests, [worker("w")], now_ms=10)

    assert decision.shed == (Shed("late", "expired"), Shed("huge", "unservable"))
    assert decision.place == (Placement("fine", "w"),)


def test_without_a_worker_only_the_expired_are_decided() -> None:
    decision = decide([pending("huge", kv_need=1000), pending("late", deadline_ms=0)], [])

    assert decision == PlacementDecision(shed=(Shed("late", "expired"),))
