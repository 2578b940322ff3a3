"""Earliest deadline first."""

from __future__ import annotations

from typing import Any

from greenroom.policies.placement.edf import EdfPlacement
from greenroom.policies.placement.placement_policy import PendingRequest, PlacementState, WorkerView


def request(name: str, **more: Any) -> PendingRequest:
    fields = {"arrived_ms": 0.0, "input_tokens": 1, "kv_need": 1, "expected_tokens": 1, "deadline_ms": 600_000.0}
    return PendingRequest(name, **{**fields, **more})


def order(*pending: PendingRequest) -> list[str]:
    worker = WorkerView("w", (), (), max_running=8, max_queued=0, kv_total=10, kv_free=10)
    decision = EdfPlacement().decide(PlacementState(pending, (worker,)), now_ms=10.0)
    return [placement.request_id for placement in decision.place]


def test_the_earliest_of_slos_and_deadline_goes_first() -> None:
    first = request("end", slo_e2e_ms=500.0)
    assert order(request("none"), request("token", slo_ttft_ms=900.0, slo_e2e_ms=5_000.0), first) == [
        "end",
        "token",
        "none",
    ]


def test_an_slo_counts_from_the_arrival() -> None:
    assert order(request("late", arrived_ms=400.0, slo_ttft_ms=300.0), request("early", slo_ttft_ms=600.0)) == [
        "early",
        "late",
    ]


def test_priority_comes_before_and_arrival_after() -> None:
    assert order(request("a"), request("b"), request("urgent", priority=1)) == ["urgent", "a", "b"]


def test_the_first_blocks_where_it_does_not_fit() -> None:
    worker = WorkerView("w", (), (), max_running=8, max_queued=0, kv_total=10, kv_free=4)
    pending = (request("small"), request("large", kv_need=9, slo_ttft_ms=50.0))
    assert EdfPlacement().decide(PlacementState(pending, (worker,)), 10.0).place == ()
