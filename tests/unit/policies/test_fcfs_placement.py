"""FCFS placement: the least loaded worker with room; tenants in turns; the expired and unservable are shed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.policies.placement.placement_policy import (
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


def test_expired_and_unservable_requests_are_shed_and_block_nothing() -> None:
    requests = [pending("late", deadline_ms=10), pending("huge", kv_need=101), pending("fine", deadline_ms=11)]

    decision = decide(requests, [worker("w")], now_ms=10)

    assert decision.shed == (Shed("late", "expired"), Shed("huge", "unservable"))
    assert decision.place == (Placement("fine", "w"),)


def test_without_a_worker_only_the_expired_are_decided() -> None:
    decision = decide([pending("huge", kv_need=1000), pending("late", deadline_ms=0)], [])

    assert decision == PlacementDecision(shed=(Shed("late", "expired"),))


# -- tenants ---------------------------------------------------------------------------------------------------------


def of(tenants: str) -> list[PendingRequest]:
    """One request for each letter, which is its tenant, in order of arrival."""
    return [
        replace(pending(f"{tenant}{place}"), arrived_ms=float(place), tenant=tenant)
        for place, tenant in enumerate(tenants)
    ]


def busy(tenants: str, *, max_running: int) -> WorkerView:
    placed = tuple(PlacedRequest(one, 0.0, 0, 5) for one in of(tenants))
    return replace(worker("w", max_running=max_running, kv_free=10_000), running=placed)


def order(requests: list[PendingRequest], running: str = "") -> str:
    """Of which tenants the requests are, as they are placed where there is room for all."""
    decision = decide(requests, [busy(running, max_running=len(running) + len(requests))])
    return "".join(placement.request_id[0] for placement in decision.place)


def test_one_that_sends_many_at_once_takes_turns_with_the_others() -> None:
    assert order(of("aaaab")) == "abaaa"
    assert order(of("aaabbcab")) == "abcababa"


def test_the_tenant_with_least_on_the_workers_is_next() -> None:
    assert order(of("ab"), running="aab") == "ba"
    assert order(of("aab"), running="b") == "aab"
    [placement] = decide(of("aaab"), [busy("aaa", max_running=4)]).place
    assert placement.request_id == "b3"


TENANTS = st.text("abc", max_size=12)


@given(waiting=TENANTS, running=TENANTS)
def test_requests_of_a_tenant_keep_their_order(waiting: str, running: str) -> None:
    decision = decide(of(waiting), [busy(running, max_running=100)])
    for tenant in "abc":
        places = [int(one.request_id[1:]) for one in decision.place if one.request_id[0] == tenant]
        assert places == sorted(places)
        assert len(places) == waiting.count(tenant)


@given(waiting=st.lists(st.integers(1, 120), max_size=8), running=st.integers(0, 5), room=st.integers(0, 8))
def test_with_one_tenant_it_is_the_order_of_arrival(waiting: list[int], running: int, room: int) -> None:
    """Whatever its name is, and whatever others have on the workers."""
    requests = [pending(f"p{place}", kv_need=need) for place, need in enumerate(waiting)]
    named = [replace(one, tenant="ann") for one in requests]
    view = worker("w", running=running, max_running=running + room)
    assert decide(named, [view]) == decide(requests, [view])
    placed = [one.request_id for one in decide(named, [view]).place]
    fit = [one.request_id for one in named if one.kv_need <= 100]
    assert placed == fit[: len(placed)]


@given(steps=st.lists(st.tuples(TENANTS, st.integers(0, 3)), min_size=1, max_size=20), places=st.integers(1, 3))
def test_no_tenant_starves(steps: list[tuple[str, int]], places: int) -> None:
    """At each step more come and some of those that run end, the oldest first. A waiting
    tenant with nothing on the workers is behind none that came later."""
    waiting: list[PendingRequest] = []
    running: list[PendingRequest] = []
    number = 0
    for coming, ending in steps:
        for tenant in coming:
            waiting.append(replace(pending(f"{tenant}{number}"), arrived_ms=float(number), tenant=tenant))
            number += 1
        del running[:ending]
        view = replace(
            worker("w", max_running=places, kv_free=10_000),
            running=tuple(PlacedRequest(one, 0.0, 0, 5) for one in running),
        )
        before = Counter(one.tenant for one in running)
        chosen = [one.request_id for one in decide(waiting, [view]).place]
        assert len(chosen) == min(len(waiting), places - len(running))
        firsts = {tenant: next((one for one in waiting if one.tenant == tenant), None) for tenant in "abc"}
        left_out = [one for one in firsts.values() if one and not before[one.tenant] and one.request_id not in chosen]
        for one in left_out:
            overtook = [other for other in waiting if other.request_id in chosen and other.arrived_ms > one.arrived_ms]
            assert overtook == []
        running += [one for one in waiting if one.request_id in chosen]
        waiting = [one for one in waiting if one.request_id not in chosen]


@given(first=st.integers(1, 40), others=st.integers(1, 5))
def test_a_flood_costs_each_other_tenant_one_turn(first: int, others: int) -> None:
    """A request that comes behind a flood begins after at most one request of each tenant before it."""
    flood = of("a" * first)
    late = [replace(pending(f"t{n}"), arrived_ms=1000.0 + n, tenant=f"t{n}") for n in range(others)]
    room = replace(worker("w", max_running=first + others, kv_free=10_000))
    placed = [one.request_id for one in decide([*flood, *late], [room]).place]
    assert placed[: 1 + others] == ["a0", *(one.request_id for one in late)]
