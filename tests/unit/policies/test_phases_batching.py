"""Batching by phase: prompts whole and together up to R*, decode rows always; holding back; the two phases apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    UNKNOWN_COSTS,
    BatchDecision,
    BatchLimits,
    BatchState,
    RunningSequence,
    StepCosts,
    WaitingSequence,
)
from greenroom.policies.batching.phases import PhasesBatching
from greenroom.policies.registry import create_batch_policy

LIMITS = BatchLimits(tokens_per_step=100, max_running=8, kv_total=1000, prefill_chunk=4)
DEAR, CHEAP = StepCosts(0.01, 0.1, 0.02), StepCosts(0.001, 0.1, 0.02)
"""R* is 10 and 100 rows."""


def waits(*prompts: int, **options: Any) -> list[WaitingSequence]:
    """A waiting sequence for each prompt of so many tokens, numbered from 100 on."""
    return [WaitingSequence(100 + n, tokens, tokens, **options) for n, tokens in enumerate(prompts)]


def decodes(count: int) -> list[RunningSequence]:
    return [RunningSequence(n, prefill_left=0) for n in range(count)]


def decide(
    waiting: list[WaitingSequence],
    running: list[RunningSequence] | None = None,
    *,
    costs: StepCosts = DEAR,
    limits: BatchLimits = LIMITS,
    kv_free: int = 1000,
    **options: Any,
) -> BatchDecision:
    state = BatchState(tuple(waiting), tuple(running or []), kv_free, limits, costs)
    return PhasesBatching(**options).decide(state)


def prompts(decision: BatchDecision) -> dict[int, int]:
    """Prompt rows of each sequence."""
    parts = [part for step in decision.steps for part in step.rows if part.phase is Phase.PREFILL]
    return {part.sequence: part.tokens for part in parts}


def decoding(decision: BatchDecision) -> list[int]:
    return [part.sequence for step in decision.steps for part in step.rows if part.phase is Phase.DECODE]


def test_a_prompt_larger_than_the_balanced_rows_and_the_chunk_runs_whole_with_all_that_decode() -> None:
    decision = decide(waits(60), decodes(5))

    assert prompts(decision) == {100: 60}
    assert decoding(decision) == [0, 1, 2, 3, 4]
    assert len(decision.steps) == 1


def test_prompts_join_while_the_step_has_fewer_rows_than_are_free() -> None:
    assert prompts(decide(waits(4, 4, 4, 4))) == {100: 4, 101: 4, 102: 4}  # 8 rows are fewer than 10, 12 are not
    assert prompts(decide(waits(4, 4, 4, 4), decodes(3))) == {100: 4, 101: 4}  # rows that decode count
    assert prompts(decide(waits(4, 50))) == {100: 4, 101: 50}  # the last to join may be long
    assert prompts(decide(waits(4, 4, 4, 4), costs=CHEAP)) == {100: 4, 101: 4, 102: 4, 103: 4}


def test_where_decoding_alone_fills_the_balanced_rows_one_prompt_still_runs() -> None:
    limits = replace(LIMITS, max_running=20)

    assert prompts(decide(waits(4, 4), decodes(15), limits=limits)) == {100: 4}


@pytest.mark.parametrize("costs", [UNKNOWN_COSTS, StepCosts(0.01), StepCosts(None, 0.1), StepCosts(0.01, 0.0)])
def test_without_balanced_rows_the_room_in_the_step_bounds_who_joins(costs: StepCosts) -> None:
    """Nothing measured, one of the two, or nothing missing."""
    assert costs.balanced_rows is None
    assert prompts(decide(waits(40, 40, 20, 40), costs=costs)) == {100: 40, 101: 40, 102: 20}


def test_only_the_workspace_splits_a_prompt() -> None:
    assert prompts(decide(waits(250))) == {100: 100}
    assert prompts(decide(waits(250), decodes(5))) == {100: 95}
    # What is left of it goes first; another joins if it fits, and the one that does not waits to be whole.
    left = [RunningSequence(7, prefill_left=50)]
    assert prompts(decide(waits(40, 40), left, costs=CHEAP)) == {7: 50, 100: 40}
    assert prompts(decide(waits(60, 10), left, costs=CHEAP)) == {7: 50}
    # One that no step holds whole takes what is left.
    assert prompts(decide(waits(120), left, costs=CHEAP)) == {7: 50, 100: 50}


def test_who_is_admitted_has_kv_and_a_place_and_nobody_is_overtaken() -> None:
    assert decide(waits(4, 4), kv_free=3).admit == ()
    assert decide(waits(40, 4), kv_free=20, costs=CHEAP).admit == ()
    assert decide(waits(4, 4, 4), decodes(7), costs=CHEAP).admit == (100,)
    refused = decide(waits(2000, 4), kv_free=10)
    assert ([sequence for sequence, _ in refused.refuse], refused.admit) == ([100], (101,))
    assert "2000" in refused.refuse[0][1]


def test_apart_is_a_step_of_prompts_and_one_of_what_decodes() -> None:
    both = decide(waits(4, 4, 4), decodes(3), costs=DEAR, apart=True)

    assert [{part.phase for part in step.rows} for step in both.steps] == [{Phase.PREFILL}, {Phase.DECODE}]
    assert (prompts(both), decoding(both)) == ({100: 4, 101: 4, 102: 4}, [0, 1, 2])
    assert len(decide([], decodes(3), apart=True).steps) == 1
    assert len(decide(waits(4), apart=True).steps) == 1
    assert prompts(decide(waits(100), decodes(5), apart=True)) == {100: 100}  # the step is its own


def test_a_prompt_is_held_until_its_wait_is_worth_what_its_step_adds_to_all_that_decode() -> None:
    # 4 rows beside 5: moving takes longest, 100 ms, of which 20 are a step without it. 0.5 · 80 · 5 = 200 ms.
    assert decide(waits(4, waited_ms=199.0), decodes(5), hold=0.5).admit == ()
    assert decide(waits(4, waited_ms=201.0), decodes(5), hold=0.5).admit == (100,)
    # Two that would run together wait together, and so half as long.
    assert decide(waits(2, 2, waited_ms=101.0), decodes(5), hold=0.5).admit == (100, 101)
    # 50 rows compute 550 ms with the 5: 0.5 · 530 · 5 = 1325 ms.
    assert decide(waits(50, waited_ms=1300.0), decodes(5), hold=0.5).admit == ()
    assert decide(waits(50, waited_ms=1350.0), decodes(5), hold=0.5).admit == (100,)
    # Apart, its step is one more: 0.5 · 100 · 5.
    assert decide(waits(4, waited_ms=249.0), decodes(5), hold=0.5, apart=True).admit == ()
    assert decide(waits(4, waited_ms=251.0), decodes(5), hold=0.5, apart=True).admit == (100,)


def test_those_that_decode_move_while_a_prompt_is_held() -> None:
    held = decide(waits(4), decodes(5), hold=0.5)

    assert (prompts(held), decoding(held)) == ({}, [0, 1, 2, 3, 4])


def test_nothing_is_held_where_nobody_decodes_or_a_prompt_runs_anyway_or_costs_are_unknown() -> None:
    assert decide(waits(4), hold=9.0).admit == (100,)
    assert decide(waits(4), [*decodes(5), RunningSequence(9, prefill_left=3)], hold=9.0).admit == (100,)
    assert decide(waits(4), decodes(5), hold=9.0, costs=UNKNOWN_COSTS).admit == (100,)
    assert decide(waits(4), decodes(5), hold=0.0).admit == (100,)


def test_an_slo_on_the_first_token_ends_the_hold_in_time() -> None:
    """Its own step takes 100 ms, and the one that it would wait for 20."""
    held = decide(waits(4, waited_ms=70.0, slo_ttft_ms=200.0), decodes(5), hold=9.0)
    due = decide(waits(4, waited_ms=81.0, slo_ttft_ms=200.0), decodes(5), hold=9.0)
    assert (held.admit, due.admit) == ((), (100,))
    # Also that of one behind, which can not overtake.
    behind = [*waits(4), WaitingSequence(200, 4, 4, waited_ms=81.0, slo_ttft_ms=200.0)]
    assert decide(behind, decodes(5), hold=9.0).admit == (100, 200)


@pytest.mark.parametrize(
    ("apart", "latest_ms"),
    [
        # A prompt of 4 and 5 that decode take 100 ms, 4 forwards of others take 20 ms each: this round's and the next
        # one's before the prompt's own.
        (False, 100 + (5 + 4) * 20),
        # The next round begins with the prompt's step.
        (True, 100 + 5 * 20),
    ],
)
def test_an_slo_ends_the_hold_in_time_for_the_forwards_of_a_round(apart: bool, latest_ms: float) -> None:
    limits = replace(LIMITS, rows_per_forward=1)
    held = decide(waits(4, slo_ttft_ms=latest_ms + 1), decodes(5), hold=9.0, limits=limits, apart=apart)
    due = decide(waits(4, slo_ttft_ms=latest_ms), decodes(5), hold=9.0, limits=limits, apart=apart)
    assert (held.admit, due.admit) == ((), (100,))


@given(
    hold=st.floats(0.01, 10),
    costs=st.builds(StepCosts, st.floats(0, 0.01), st.floats(0, 1), st.floats(0, 1)),
    tokens=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    running=st.integers(1, 8),
    slo_ms=st.none() | st.floats(1, 5000),
    apart=st.booleans(),
)
def test_no_prompt_is_held_for_ever(
    hold: float, costs: StepCosts, tokens: list[int], running: int, slo_ms: float | None, apart: bool
) -> None:
    """Whatever the others do: at the latest when the head alone has waited for what any step can add to them all."""
    limits = replace(LIMITS, max_running=9)
    step_s = costs.prompt_step_seconds(limits.tokens_per_step)
    assert step_s is not None
    bound_ms = 1000 * hold * step_s * running
    if slo_ms is not None:
        bound_ms = min(bound_ms, slo_ms)

    waiting = waits(*tokens, waited_ms=0.0, slo_ttft_ms=slo_ms)
    waiting[0] = replace(waiting[0], waited_ms=bound_ms + 1e-6)

    assert (
        100 in decide(waiting, decodes(running), costs=costs, limits=limits, kv_free=2000, hold=hold, apart=apart).admit
    )


@pytest.mark.parametrize("hold", [-0.1, math.inf, math.nan])
def test_hold_is_a_number_from_0(hold: float) -> None:
    with pytest.raises(InvalidConfig, match="hold"):
        create_batch_policy("phases", options={"hold": hold})


def test_only_a_hold_reads_waits() -> None:
    assert not PhasesBatching().reads_waits
    assert PhasesBatching(hold=0.1).reads_waits


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_costs_are_times(seconds: float) -> None:
    for name in ("row_seconds", "moving_seconds", "decode_seconds"):
        with pytest.raises(ValueError, match=name):
            StepCosts(**{name: seconds})
