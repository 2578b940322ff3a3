"""Every arm at a third of the experts: speed, waiting, bytes, wasted prefetches, and the share of LRU's waiting
removed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.policy_clock import LOOK_UP, of_events
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.inputs.task_prompts import in_turn
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns
from benchmarks.moe_infinity.engine.arms.compared_policies import (
    LITERAL,
    ON_DEMAND,
    ORACLE,
    ORACLE_AHEAD,
    ORACLES,
    PAPER,
)


@dataclass
class Row:
    """One arm's turns by round, round 0 being the one that warms up and left out."""

    name: str
    slots: int
    turns: dict[int, ServedTurn] = field(default_factory=dict)
    departures: int | None = None
    """Layers that were not routed as an oracle had been told."""


def run(fleet: Fleet, *, prompts: int, at_once: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All arms and both oracles, in turns, on the same prompts in the same order.

    Every turn times the policies' calls, which costs all arms alike, and little.
    """
    asks = in_turn(fleet.shared, prompts)
    oracles = _oracles(fleet, asks, at_once, rounds)
    arms = [*fleet.arms, *oracles]
    rows = {arm.kind.name: Row(arm.kind.name, arm.slots) for arm in arms}
    total = (rounds + 1) * len(arms)
    try:
        with progress(total, f"a third, {at_once} at once", "turn") as bar:
            for round_, arm in in_turns(arms, rounds, seconds):
                turn = arm.run(asks, at_once, look_inside=True)
                if round_:
                    rows[arm.kind.name].turns[round_] = turn
                bar.update()
        for arm in oracles:
            rows[arm.kind.name].departures = getattr(arm.policy, "departures", None)
    finally:
        for arm in oracles:
            arm.close()
    return {**figures(rows, asks), "settings": {"prompts": prompts, "at_once": at_once}}


def _oracles(fleet: Fleet, asks: Sequence[Ask], at_once: int, rounds: int) -> list[EngineArm]:
    """They know the routing of all turns to come. It is the same under every policy."""
    _, record = fleet[ON_DEMAND].recorded(asks, at_once)
    future = record.future(rounds + 1)
    return [EngineArm(kind, fleet.shared, fleet.share, future=future) for kind in ORACLES]


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Mapping[str, Row], asks: Sequence[Ask]) -> dict[str, Any]:
    """``stall_recovered``: of the better form of MoE-Infinity, as a share of what the better oracle saves.

    ``lookup_share``: of MoE-Infinity's look-ups and priorities.
    """
    lru = rows[ON_DEMAND]
    found = {name: _figures(row, rows, lru, asks) for name, row in rows.items()}
    recovered = [own["stall_recovered"]["median"] for name in (PAPER, LITERAL)
                 if (own := found.get(name)) and own["stall_recovered"]]  # fmt: skip
    return {
        "rows": found,
        "stall_recovered": max(recovered, default=None),
        "lookup_share": found[PAPER]["lookup_share"] if PAPER in found else None,
    }


def _figures(row: Row, rows: Mapping[str, Row], lru: Row, asks: Sequence[Ask]) -> dict[str, Any]:
    turns = list(row.turns.values())
    tokens, steps = sum(turn.tokens for turn in turns), sum(turn.steps for turn in turns)
    seconds, prefetches = sum(turn.seconds for turn in turns), sum(turn.prefetches for turn in turns)
    per_token = [own for turn in turns for own in turn.per_token]
    methods: Counter[str] = Counter()
    for turn in turns:
        methods.update(turn.policy_seconds)
    on_demand, ahead = ([rows[name]] if name in rows else [] for name in (ORACLE, ORACLE_AHEAD))
    return {
        "slots": row.slots,
        "rounds": len(turns),
        "tokens_per_s": spread_json(Spread.of([turn.tokens / turn.seconds for turn in turns])),
        "ms_per_token": 1e3 * statistics.fmean(per_token),
        "stall_ms_per_token": 1e3 * sum(turn.stall_seconds for turn in turns) / tokens,
        "mib_per_token": sum(turn.bytes_moved for turn in turns) / tokens / 2**20,
        "hit_rate": sum(turn.hits for turn in turns) / sum(turn.look_ups for turn in turns),
        "on_demand_per_token": sum(turn.on_demand for turn in turns) / tokens,
        "prefetches_per_token": prefetches / tokens,
        "wasted_share": sum(turn.prefetches_wasted for turn in turns) / prefetches if prefetches else None,
        "stall_recovered": spread_json(_recovered(row, lru, on_demand + ahead, lambda turn: turn.stall_seconds)),
        "stall_recovered_on_demand": spread_json(_recovered(row, lru, on_demand, lambda turn: turn.stall_seconds)),
        "time_recovered": spread_json(_recovered(row, lru, on_demand + ahead, lambda turn: turn.seconds)),
        "lookup_share": methods[LOOK_UP] / seconds,
        "events_share": of_events(methods) / seconds,
        "policy_share": sum(methods.values()) / seconds,
        "policy_us_per_step": {name: 1e6 * spent / steps for name, spent in sorted(methods.items())},
        "step_ms": 1e3 * seconds / steps,
        "same_answers": turns[0].ids == next(iter(lru.turns.values())).ids,
        "departures": row.departures,
        "ms_per_token_by_task": _by_task(turns, asks),
    }


def _recovered(row: Row, lru: Row, oracles: Sequence[Row], spent: Callable[[ServedTurn], float]) -> Spread | None:
    """(T_lru - T) / (T_lru - T_oracle) by round, with the better oracle of that round; None of LRU itself."""
    if row is lru:
        return None
    shares = []
    for number, turn in row.turns.items():
        if number in lru.turns and (best := [spent(one.turns[number]) for one in oracles if number in one.turns]):
            worst = spent(lru.turns[number])
            if worst > min(best):
                shares.append((worst - spent(turn)) / (worst - min(best)))
    return Spread.of(shares)


def _by_task(turns: Sequence[ServedTurn], asks: Sequence[Ask]) -> dict[str, dict[str, float]]:
    """Milliseconds a token of each task's prompts: mean, least and most of the rounds."""
    found = {}
    for task in dict.fromkeys(ask.task for ask in asks):
        places = [place for place, ask in enumerate(asks) if ask.task == task]
        rounds = [1e3 * statistics.fmean(turn.per_token[place] for place in places) for turn in turns]
        found[task] = {"mean": statistics.fmean(rounds), "min": min(rounds), "max": max(rounds)}
    return found
