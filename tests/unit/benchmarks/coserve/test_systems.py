"""Batches by expert: full ones go at once, others when their first request has waited long enough."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.coserve.systems import MATCHED, SIMPLE, BatchesByExpert, Early
from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.policies.placement.placement_policy import PendingRequest, Shed


class Told(Dispatcher):
    """Notes what comes."""

    def __init__(self) -> None:
        self.came: list[tuple[float, list[str]]] = []

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        self.came.append((now_ms, [request.request_id for request in requests]))
        return ()

    def finished(self, executor: str, now_ms: float) -> None:
        raise AssertionError

    def cancel(self, request: PendingRequest) -> bool:
        raise AssertionError

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        raise AssertionError

    def next_runs(self, now_ms: float) -> list[Run]:
        return []

    @property
    def waiting(self) -> int:
        return 0


def request(name: str, expert: int) -> PendingRequest:
    return PendingRequest(name, 0.0, 1, 1, 1, 1e9, expert=expert)


def test_a_batch_goes_when_it_is_full_or_late() -> None:
    inner = Told()
    batches = BatchesByExpert(inner, {0: 2, 1: 3}, 10.0)
    batches.arrived([request("a", 0), request("b", 1)], 0.0)
    assert batches.asks_ms == 10.0
    assert batches.waiting == 2
    batches.arrived([request("c", 0)], 4.0)
    assert inner.came == [(4.0, ["a", "c"])]
    batches.arrived([request("d", 0)], 6.0)
    assert batches.asks_ms == 10.0  # b's
    batches.next_runs(9.0)
    assert len(inner.came) == 1
    batches.next_runs(10.0)
    assert inner.came[1:] == [(10.0, ["b"])]
    assert batches.asks_ms == 16.0  # d's, not that of the batch which was full
    batches.next_runs(30.0)
    assert inner.came[2:] == [(30.0, ["d"])]
    assert batches.asks_ms is None
    assert batches.waiting == 0


def test_what_is_simple_and_what_has_the_executors_of_coserve() -> None:
    assert "pull" not in SIMPLE
    assert "pull, LRU" not in SIMPLE
    assert {"CoServe", "CoServe EM", "Samba-CoE Parallel"} <= set(MATCHED)
    assert "CoServe Casual" not in MATCHED


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(Exception, match="mru"):
        Early("mru").make_policy(None, None)  # type: ignore[arg-type]
