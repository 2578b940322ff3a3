"""FCFS continuous batching: decode first, prompts in chunks, the head of the queue blocks."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchLimits,
    BatchState,
    RunningSequence,
    WaitingSequence,
)
from greenroom.policies.batching.fcfs import FcfsBatching

LIMITS = BatchLimits(tokens_per_step=10, max_running=4, kv_total=100)


def decide(
    *,
    waiting: list[WaitingSequence] | None = None,
    running: list[RunningSequence] | None = None,
    kv_free: int = 100,
    limits: BatchLimits = LIMITS,
) -> BatchDecision:
    state = BatchState(tuple(waiting or []), tuple(running or []), kv_free, limits)
    return FcfsBatching().decide(state)


def rows(decision: BatchDecision) -> list[tuple[int, int, Phase]]:
    assert len(decision.steps) <= 1
    return [(part.sequence, part.tokens, part.phase) for step in decision.steps for part in step.rows]


def test_decode_rows_come_before_prompts_in_order_of_admission() -> None:
    decision = decide(
        running=[
            RunningSequence(1, prefill_left=4),
            RunningSequence(2, prefill_left=0),
            RunningSequence(3, prefill_left=30),
        ]
    )

    assert rows(decision) == [(2, 1, Phase.DECODE), (1, 4, Phase.PREFILL), (3, 5, Phase.PREFILL)]
    assert decision.steps[0].tokens == 10


def test_a_new_request_starts_with_as_large_a_chunk_as_is_left() -> None:
    decision = decide(
        running=[RunningSequence(1, prefill_left=0)],
        waiting=[WaitingSequence(2, 6, 20), WaitingSequence(3, 50, 60), WaitingSequence(4, 1, 2)],
    )

    assert rows(decision) == [(1, 1, Phase.DECODE), (2, 6, Phase.PREFILL), (3, 3, Phase.PREFILL)]
    # No row is left for 4, so it keeps waiting and holds no KV.
    assert decision.admit == (2, 3)


def test_a_chunk_is_no_larger_than_configured() -> None:
    limits = BatchLimits(tokens_per_step=10, max_running=4, kv_total=100, prefill_chunk=4)

    decision = decide(running=[RunningSequence(1, prefill_left=9)], waiting=[WaitingSequence(2, 9, 10)], limits=limits)

    assert rows(decision) == [(1, 4, Phase.PREFILL), (2, 4, Phase.PREFILL)]


def test_the_head_of_the_queue_blocks_those_that_would_fit() -> None:
    decision = decide(waiting=[WaitingSequence(1, 5, 40), WaitingSequence(2, 1, 1)], kv_free=39)

    assert decision == BatchDecision()


def test_reservations_of_one_decision_add_up() -> None:
    decision = decide(waiting=[WaitingSequence(n, 1, 40) for n in (1, 2, 3)], kv_free=100)

    assert decision.admit == (1, 2)


def test_no_more_run_than_may() -> None:
    decision = decide(
        running=[RunningSequence(n, prefill_left=0) for n in (1, 2, 3)],
        waiting=[WaitingSequence(4, 1, 1), WaitingSequence(5, 1, 1)],
    )

    assert decision.admit == (4,)


def test_what_can_never_fit_is_refused_with_the_reason_and_blocks_nothing() -> None:
    decision = decide(waiting=[WaitingSequence(1, 5, 101), WaitingSequence(2, 5, 50)])

    assert decision.admit == (2,)
    assert [sequence for sequence, _ in decision.refuse] == [1]
    assert "101" in decision.refuse[0][1]
    assert "100" in decision.refuse[0][1]


def test_it_is_refused_from_behind_a_blocked_head_too() -> None:
    decision = decide(waiting=[WaitingSequence(1, 5, 40), WaitingSequence(2, 5, 101)], kv_free=10)

    assert decision.admit == ()
    assert [sequence for sequence, _ in decision.refuse] == [2]


def test_decode_rows_beyond_those_of_a_forward_run_in_fixed_groups_and_prompts_with_the_last() -> None:
    limits = BatchLimits(tokens_per_step=10, max_running=4, kv_total=100, rows_per_forward=2)

    decision = decide(
        running=[*(RunningSequence(n, prefill_left=0) for n in (3, 1, 2)), RunningSequence(7, prefill_left=20)],
        limits=limits,
    )

    first, second = decision.steps
    assert [part.sequence for part in first.rows] == [3, 1]
    assert [(part.sequence, part.tokens) for part in second.rows] == [(2, 1), (7, 9)]


def test_nothing_to_do_is_no_step() -> None:
    assert decide() == BatchDecision()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens_per_step", {"tokens_per_step": 0}),
        ("max_running", {"max_running": 11}),
        ("max_running", {"max_running": 0}),
        ("kv_total", {"kv_total": -1}),
        ("prefill_chunk", {"prefill_chunk": 0}),
    ],
)
def test_limits_that_can_not_work_are_refused_by_field(field: str, change: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"tokens_per_step": 10, "max_running": 4, "kv_total": 100}

    with pytest.raises(InvalidConfig) as caught:
        BatchLimits(**(sound | change))

    assert caught.value.field == field


def test_a_request_needs_a_token_to_start_from() -> None:
    with pytest.raises(ValueError, match="no token"):
        WaitingSequence(1, 0, 5)
