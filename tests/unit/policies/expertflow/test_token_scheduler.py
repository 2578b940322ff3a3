"""The token scheduler's rounds: who runs with whom, in which order, and when nothing is grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchLimits,
    BatchState,
    RunningSequence,
    SequencePaths,
    WaitingSequence,
)
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.expertflow.token_scheduler import TokenScheduler

LIMITS = BatchLimits(tokens_per_step=20, max_running=8, kv_total=100, rows_per_forward=2)
UNBOUNDED = replace(LIMITS, rows_per_forward=None)
KINDS = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=np.float32)
"""Two kinds of rows, of two experts each."""


def state(
    kinds: Sequence[int],
    *,
    limits: BatchLimits = LIMITS,
    resident: Sequence[int] | None = None,
    waiting: Sequence[WaitingSequence] = (),
    prompts: dict[int, int] | None = None,
    prefill: Sequence[RunningSequence] = (),
) -> BatchState:
    """Sequences 10, 11, … decode, of these kinds. ``prompts``: kinds of others by sequence."""
    running = [RunningSequence(10 + place, prefill_left=0) for place in range(len(kinds))]
    told = [each.sequence for each in running] + list(prompts or ())
    chances = KINDS[[*kinds, *(prompts or {}).values()]]
    return BatchState(
        tuple(waiting),
        (*running, *prefill),
        100,
        limits,
        paths=SequencePaths(np.array(told, dtype=np.int64), chances),
        resident=None if resident is None else np.isin(np.arange(4), resident),
    )


def forwards(decision: BatchDecision) -> list[list[int]]:
    return [[part.sequence for part in plan.rows if part.phase is Phase.DECODE] for plan in decision.steps]


def test_rows_of_like_paths_run_together_and_the_group_of_what_is_resident_first() -> None:
    assert forwards(TokenScheduler().decide(state([0, 1, 0, 1], resident=[2, 3]))) == [[11, 13], [10, 12]]
    assert forwards(TokenScheduler().decide(state([0, 1, 0, 1], resident=[0, 1]))) == [[10, 12], [11, 13]]


def test_the_next_round_is_grouped_anew() -> None:
    policy = TokenScheduler(literal=True)
    assert forwards(policy.decide(state([0, 1, 0, 1], resident=[0, 1]))) == [[10, 12], [11, 13]]
    assert forwards(policy.decide(state([0, 0, 1, 1], resident=[0, 1]))) == [[10, 11], [12, 13]]


def test_one_forward_runs_wherever_it_may_unless_groups_are_forced() -> None:
    together = state([0, 1, 0, 1], limits=UNBOUNDED, resident=[0])
    assert forwards(TokenScheduler().decide(together)) == [[10, 11, 12, 13]]
    assert forwards(TokenScheduler(force=True).decide(together)) == [[10, 12], [11, 13]]


def test_without_paths_or_where_all_is_resident_it_is_first_come_first_served() -> None:
    told = state([0, 1, 0, 1, 0], waiting=[WaitingSequence(20, 5, 5)])
    fcfs = FcfsBatching().decide(told)
    for force in (False, True):
        policy = TokenScheduler(force=force)
        assert policy.decide(replace(told, paths=None)) == fcfs
        assert policy.decide(replace(told, resident=np.ones(4, dtype=np.bool_))) == fcfs
        one_unknown = SequencePaths(np.arange(10, 14), KINDS[[0, 1, 0, 1]])
        assert policy.decide(replace(told, paths=one_unknown)) == fcfs
    assert "greenroom paths fit" in TokenScheduler.without_paths


def test_paths_may_come_in_any_order() -> None:
    told = state([0, 1, 0, 1], resident=[0, 1])
    assert told.paths is not None
    turned = SequencePaths(told.paths.sequences[::-1].copy(), told.paths.chances[::-1].copy())
    assert TokenScheduler().decide(replace(told, paths=turned)) == TokenScheduler().decide(told)


def test_a_prompt_runs_whole_beside_the_rows_that_share_most_with_it_else_with_the_last() -> None:
    waiting = [WaitingSequence(30, 5, 5), WaitingSequence(31, 4, 5)]

    def beside(prompts: dict[int, int], *, prefill: Sequence[RunningSequence] = ()) -> list[list[tuple[int, int]]]:
        told = state([0, 1, 0, 1], resident=[0, 1], waiting=waiting, prompts=prompts, prefill=prefill)
        steps = TokenScheduler().decide(told).steps
        return [[(part.sequence, part.tokens) for part in plan.rows if part.tokens > 1] for plan in steps]

    assert beside({}) == [[], [(30, 5), (31, 4)]]
    assert beside({30: 0}) == [[(30, 5), (31, 4)], []]
    assert beside({30: 1}) == [[], [(30, 5), (31, 4)]]
    assert beside({29: 0, 30: 1}, prefill=[RunningSequence(29, prefill_left=3)]) == [[(29, 3), (30, 5), (31, 4)], []]


def test_prompts_have_a_forward_of_their_own_where_rows_fill_all_others() -> None:
    limits = BatchLimits(tokens_per_step=2, max_running=8, kv_total=100, plans_rounds=True)

    decision = TokenScheduler().decide(state([0, 1, 0, 1], limits=limits, waiting=[WaitingSequence(30, 5, 5)]))

    assert [plan.tokens for plan in decision.steps] == [2, 2, 2]
    assert decision.admit == (30,)


@pytest.mark.parametrize(
    ("decoding", "wanted", "forwards_and_rows"),
    [
        (14, 480, [14, 16]),  # room for 2 of 16 rows is little
        (14, 2, [16]),  # which is enough for what wants no more
        (12, 480, [16]),  # a quarter is not little
        (31, 480, [16, 15, 16]),
        (16, 480, [16, 16]),
        (16, 0, [16]),
    ],
)
def test_prompts_do_not_crawl_beside_a_group_that_leaves_them_little_room(
    decoding: int, wanted: int, forwards_and_rows: list[int]
) -> None:
    limits = BatchLimits(tokens_per_step=16, max_running=64, kv_total=100, plans_rounds=True)
    prompts = [RunningSequence(99, prefill_left=wanted)] if wanted else []

    decision = TokenScheduler().decide(state([0] * decoding, limits=limits, prefill=prompts))

    assert [plan.tokens for plan in decision.steps] == forwards_and_rows


def test_prompts_in_a_forward_of_their_own_keep_to_the_chunk_and_start_in_order() -> None:
    limits = BatchLimits(tokens_per_step=16, max_running=64, kv_total=100, prefill_chunk=6, plans_rounds=True)
    waiting = [WaitingSequence(number, 50, 5) for number in (30, 31, 32, 33)]

    decision = TokenScheduler().decide(state([0] * 14, limits=limits, waiting=waiting))

    assert [(part.sequence, part.tokens) for part in decision.steps[1].rows] == [(30, 6), (31, 6), (32, 4)]
    assert decision.admit == (30, 31, 32)


def test_a_seed_below_0_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="seed"):
        TokenScheduler(seed=-1)
