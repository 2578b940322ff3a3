"""From turns to figures: no engine."""

from __future__ import annotations

import pytest

from benchmarks.harness.arms.policy_clock import LOOK_UP
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.rounds import in_turns
from benchmarks.moe_infinity.engine.arms.compared_policies import (
    KINDS,
    LITERAL,
    ON_DEMAND,
    ORACLE_AHEAD,
    ORACLES,
    PAPER,
    REUSE,
    kind_of,
)
from benchmarks.moe_infinity.engine.effort import QUICK, Scale
from benchmarks.moe_infinity.engine.parts import at_a_third, by_budget, by_request_rate
from benchmarks.moe_infinity.engine.parts.batch_server import Served

ASKS = [Ask("question", (1,), (1, 2)), Ask("compare", (1,), (1, 2))]


def turn(seconds: float, stall: float, **values: object) -> ServedTurn:
    made = ServedTurn(
        seconds, 4, [[1, 2], [3, 4]], bytes_moved=4 << 20, look_ups=10, hits=5, prefetches=4, steps=4,
        stall_seconds=stall, request_seconds=[0.4 * seconds, 0.6 * seconds], prefetches_wasted=1,
        policy_seconds={"on_layer_routed": 0.006 * seconds, LOOK_UP: 0.004 * seconds, "victims": 0.02 * seconds},
    )  # fmt: skip
    for name, value in values.items():
        setattr(made, name, value)
    return made


def rows(**turns: list[ServedTurn]) -> dict[str, at_a_third.Row]:
    return {name: at_a_third.Row(name, 32, dict(enumerate(own, start=1))) for name, own in turns.items()}


def test_the_waiting_that_is_removed_is_of_that_which_the_oracle_does_without() -> None:
    found = at_a_third.figures(
        {
            **rows(lru=[turn(10, 4.0), turn(11, 4.0)], reuse=[turn(9, 3.0), turn(9, 3.0)]),
            PAPER: at_a_third.Row(PAPER, 32, {1: turn(8, 3.5), 2: turn(8, 3.5)}),
            LITERAL: at_a_third.Row(LITERAL, 32, {1: turn(8, 2.0), 2: turn(8, 3.0)}),
            ORACLE_AHEAD: at_a_third.Row(ORACLE_AHEAD, 32, {1: turn(6, 2.0), 2: turn(6, 2.0)}),
        },
        ASKS,
    )
    row = found["rows"][LITERAL]
    assert row["stall_recovered"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert row["time_recovered"] == {"median": pytest.approx(0.55), "min": 0.5, "max": pytest.approx(0.6)}
    assert row["stall_recovered_on_demand"] is None, "that oracle did not run"
    assert found["stall_recovered"] == 0.75, "the better of MoE-Infinity's forms, not reuse"
    assert found["rows"][ON_DEMAND]["stall_recovered"] is None
    assert found["rows"][PAPER]["events_share"] == pytest.approx(0.01)
    assert found["rows"][PAPER]["policy_share"] == pytest.approx(0.03)
    assert found["rows"][PAPER]["policy_us_per_step"]["victims"] == pytest.approx(1e6 * 0.02 * 16 / 8)
    assert found["lookup_share"] == pytest.approx(0.004)
    assert row["mib_per_token"] == 1.0
    assert row["wasted_share"] == 0.25
    assert row["ms_per_token_by_task"]["compare"]["mean"] == pytest.approx(1e3 * 0.6 * 8 / 2)


def test_of_two_oracles_each_round_has_the_one_that_waits_less() -> None:
    found = at_a_third.figures(
        {
            **rows(lru=[turn(10, 4.0), turn(10, 4.0)], belady=[turn(7, 1.0), turn(7, 3.0)]),
            PAPER: at_a_third.Row(PAPER, 32, {1: turn(8, 2.5), 2: turn(8, 3.0)}),
            ORACLE_AHEAD: at_a_third.Row(ORACLE_AHEAD, 32, {1: turn(6, 2.0), 2: turn(6, 2.0)}),
        },
        ASKS,
    )
    assert found["rows"][PAPER]["stall_recovered"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert found["rows"][PAPER]["stall_recovered_on_demand"] == {"median": 0.75, "min": 0.5, "max": 1.0}


def test_a_row_that_waits_more_than_lru_removes_less_than_nothing_and_other_answers_are_told() -> None:
    found = at_a_third.figures(
        {
            **rows(lru=[turn(10, 4.0)], reuse=[turn(9, 5.0, ids=[[1, 2], [3, 5]])]),
            ORACLE_AHEAD: at_a_third.Row(ORACLE_AHEAD, 32, {1: turn(6, 2.0)}),
        },
        ASKS,
    )
    assert found["rows"][REUSE]["stall_recovered"]["median"] == -0.5
    assert not found["rows"][REUSE]["same_answers"]
    assert found["stall_recovered"] is None


def point(share: float, **ratios: float) -> dict[str, object]:
    return {"share": share, "rows": {name: {"over_resident": {"median": ratio}} for name, ratio in ratios.items()}}


def test_the_smallest_budget_keeps_the_bound_with_all_larger_ones() -> None:
    points = [point(0.2, a=4.0, b=1.4), point(0.5, a=1.9, b=2.5), point(0.75, a=1.2, b=1.1)]
    found = by_budget.smallest(points)
    assert found["2"] == {"a": 0.5, "b": 0.75}
    assert found["5"] == {"a": 0.2, "b": 0.2}
    assert by_budget.smallest([point(0.5, a=9.0)])["5"] == {"a": None}


def test_the_highest_rate_within_a_bound() -> None:
    def row(ms: float) -> dict[str, object]:
        return {"mean_ms": {"median": ms}}

    found = {"points": [{"rate": 1.0, "rows": {"a": row(10), "b": row(90)}}, {"rate": 2.0, "rows": {"a": row(20)}}]}
    assert by_request_rate.highest_rates(found, 30.0) == {"a": 2.0, "b": None}


def test_latencies_by_rate_are_of_all_requests_and_the_spread_of_the_rounds() -> None:
    runs = [[Served("t", 0.0, 1.0, 2.0, 4), Served("t", 1.0, 1.0, 2.0, 2)], [Served("t", 0.0, 1.0, 3.0, 3)]]
    found = by_request_rate._figures(runs)
    assert found["per_token_ms"] == [500.0, 500.0, 1000.0]
    assert found["mean_ms"] == {"median": 750.0, "min": 500.0, "max": 1000.0}
    assert found["mean_batch"] == 1.5
    assert found["waited_s"] == pytest.approx(2 / 3)


def test_arms_take_turns_and_no_round_begins_that_would_end_too_late() -> None:
    moments = iter(range(0, 1000, 10))
    turns = list(in_turns(["a", "b"], 9, 25.0, clock=lambda: float(next(moments))))
    assert turns == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert [round_ for round_, _ in in_turns(["a"], 2, 1e9, warm_up=False)] == [1, 2]


def test_the_plan_keeps_within_what_the_whole_benchmark_has_for_it() -> None:
    assert sum(Scale().planned.values()) <= 25 * 60
    assert sum(QUICK.planned.values()) <= 70


def test_arms_are_known_by_name() -> None:
    for kind in (*KINDS, *ORACLES):
        assert kind_of(kind.name) is kind
    with pytest.raises(LookupError, match="moe-infinity literal"):
        kind_of("lfru")
