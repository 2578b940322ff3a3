"""Assigning and arranging (CoServe, section 4.2), by examples with known times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.coe.dispatch.grouped_queue import GroupedQueue
from greenroom.policies.coserve.scheduling import CoServePlacement
from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacedRequest,
    PlacementState,
    QueuedGroup,
    WorkerView,
)

COSTS = Costs(token_ms=1, batch_ms=5, load_ms_by_expert={1: 100, 2: 100, 3: 100}, request_ms_by_expert={3: 2})


def request(name: str, expert: int | None) -> PendingRequest:
    return PendingRequest(name, 0, 1, 1, 1, deadline_ms=1e9, expert=expert)


def executor(
    name: str, *groups: tuple[int, int], resident: tuple[int, ...] = (), running: int | None = None, busy_ms: float = 0
) -> WorkerView:
    runs = () if running is None else (PlacedRequest(request(f"{name} runs", running), 0, 0, 1),)
    return WorkerView(
        name, runs, (), max_running=1, max_queued=100, kv_total=100, kv_free=100, costs=COSTS,
        resident=np.array(resident, dtype=np.int64), groups=tuple(QueuedGroup(*own) for own in groups), busy_ms=busy_ms,
    )  # fmt: skip


def placed(executors: list[WorkerView], *experts: int | None, **options: bool) -> list[tuple[str, int | None]]:
    pending = tuple(request(str(place), expert) for place, expert in enumerate(experts))
    decision = CoServePlacement(**options).decide(PlacementState(pending, tuple(executors)), 0)
    assert [one.request_id for one in decision.place] == [one.request_id for one in pending]
    return [(one.worker, one.position) for one in decision.place]


def test_the_longest_executor_decides_and_then_what_is_added() -> None:
    # As in Fig. 8: the third is longest whatever the first two get; the request adds less to the second.
    queues = [executor("a", (2, 1)), executor("b", (1, 4)), executor("c", (3, 1), busy_ms=1000)]
    assert placed(queues, 1) == [("b", None)]


@pytest.mark.parametrize(
    ("views", "chosen"),
    [
        ([executor("a"), executor("b", resident=(1,))], "b"),  # a would load it
        ([executor("a", (1, 1)), executor("b", busy_ms=200)], "a"),  # its load is on the way
        ([executor("a", (1, 1)), executor("b")], "b"),  # 107 after the other's 106
        ([executor("a", resident=(1,), running=1, busy_ms=3), executor("b", resident=(1,))], "a"),  # no other batch
        ([executor("b"), executor("a")], "a"),  # by name at last
    ],
)
def test_a_request_goes_where_all_are_done_soonest(views: list[WorkerView], chosen: str) -> None:
    ((name, _),) = placed(views, 1)
    assert name == chosen


def test_requests_of_one_decision_count_for_the_next() -> None:
    # 106, then 106 beside it; the third one adds 1 to either
    assert placed([executor("a"), executor("b")], 1, 2, 1, 2, 3) == [
        ("a", None), ("b", None), ("a", None), ("b", None), ("a", None),
    ]  # fmt: skip


def test_a_request_comes_behind_the_last_of_its_expert() -> None:
    view = executor("a", (1, 3), (2, 2), (3, 1), resident=(1, 2, 3))
    assert placed([view], 1, 2, 3, 1, None, 3) == [("a", 3), ("a", 6), ("a", None), ("a", 4), ("a", None), ("a", 10)]
    assert placed([view], 1, 2, arranging=False) == [("a", None), ("a", None)]


def test_of_an_expert_that_was_not_arranged_the_last_group_counts() -> None:
    assert placed([executor("a", (1, 1), (2, 1), (1, 2), (3, 1))], 1) == [("a", 4)]


def test_without_assigning_the_one_with_fewest_requests_gets_it() -> None:
    views = [executor("a", (1, 2), (2, 1), resident=(1,)), executor("b", (2, 2), busy_ms=1e4)]
    assert placed(views, 1, 1, 2, assigning=False) == [("b", None), ("a", 2), ("b", 2)]


def test_models_have_times_of_their_own() -> None:
    slow = executor("a", resident=(1, 3), running=3, busy_ms=0)
    fast = executor("b", resident=(1, 3), running=3, busy_ms=1.5)
    assert placed([slow, fast], 3) == [("a", None)]
    assert placed([slow, fast], 3, 3) == [("a", None), ("b", None)]  # K is 2: 2 and then 3.5 against 4


@given(st.data(), st.booleans(), st.booleans())
def test_what_is_kept_of_queues_changes_no_decision(data: st.DataObject, assigning: bool, arranging: bool) -> None:
    kept = CoServePlacement(assigning=assigning, arranging=arranging)
    queues = {"a": GroupedQueue(), "b": GroupedQueue(), "c": GroupedQueue()}
    running: dict[str, int] = {}
    few = st.lists(st.integers(0, 5), max_size=4)
    for round_ in range(data.draw(st.integers(1, 8))):
        arriving = tuple(request(f"{round_}.{at}", expert) for at, expert in enumerate(data.draw(few)))
        views = [
            dataclasses.replace(
                executor(name, resident=tuple(data.draw(few)), running=running.get(name)), groups=queue.groups()
            )
            for name, queue in queues.items()
        ]
        state = PlacementState(arriving, tuple(views))
        decision = kept.decide(state, 0)
        assert decision == CoServePlacement(assigning=assigning, arranging=arranging).decide(state, 0)
        for own, one in zip(arriving, decision.place, strict=True):
            queues[one.worker].insert(own, one.position)
        name = data.draw(st.sampled_from(sorted(queues)))
        running.pop(name, None)
        if queues[name]:
            (first, *_) = queues[name].take(2)
            assert first.expert is not None
            running[name] = first.expert
