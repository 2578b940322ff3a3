"""Tokens a second at a third of the experts, and what the link does meanwhile, by the phase of the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.duoserve.engine.served import Served
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, geometric, spread_json
from benchmarks.harness.rounds import in_turns

OURS: Final = "duoserve"
BEST: Final = ("look-ahead", "reuse")
"""The better of these in a round is what is compared with."""
BARE: Final = Kind("duoserve, no files", OURS, bare=True)
"""As `serve` has it where nothing was fitted: what its default is chosen by, since `look-ahead` needs no file."""
KINDS: Final = (*(Kind(name, name) for name in (OURS, *BEST)), BARE)
MAPPED: Final = tuple(Kind(f"{name}, maps", name, maps=True) for name in (OURS, *BEST))
"""The same with maps of the residual stream in the routers' place."""


@dataclass
class Row:
    """One arm's turns by round, from 1 on."""

    name: str
    turns: dict[int, ServedTurn] = field(default_factory=dict)


def run(served: Served, *, prompts: int, at_once: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All arms in turns on the same prompts, the disk measured before and after each turn."""
    asks = served.asks(prompts)
    kinds = KINDS if served.maps is None else (*KINDS, *MAPPED)
    rows = {kind.name: Row(kind.name) for kind in kinds}
    with ExitStack() as stack:
        arms = [stack.enter_context(served.arm(kind)) for kind in kinds]
        with progress((rounds + 1) * len(arms), f"{served.name}, {at_once} at once", "turn") as bar:
            for round_, arm in in_turns(arms, rounds, seconds):
                if round_:
                    turn = beside_link(served, lambda: arm.run(asks, at_once))  # noqa: B023  it runs now
                    rows[arm.kind.name].turns[round_] = turn
                else:
                    arm.run(asks[: max(2, at_once)], at_once)
                bar.update()
        served.shared.detach()
    return {**figures(rows, asks), "settings": {"model": served.name, "prompts": prompts, "at_once": at_once}}


def beside_link(served: Served, turn: Callable[[], ServedTurn]) -> ServedTurn:
    """The turn with its ``link``: the mean of the disk's speeds before and after."""
    before = served.link.bytes_per_s()
    done = turn()
    done.link = (before + served.link.bytes_per_s()) / 2
    return done


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Mapping[str, Row], asks: Sequence[Ask]) -> dict[str, Any]:
    """``speed_ratio_best``: tokens/s of `duoserve` over the better of the two others in the same round, the median.

    ``maps_over_routers``: of each policy, tokens/s with maps over those without, by round.
    """
    ours, others = rows[OURS].turns, [rows[name].turns for name in BEST]
    best = {number: max(_speed(turns[number]) for turns in others) for number in ours}
    speeds = [_speed(turn) for turn in ours.values()]
    first = next(iter(ours.values()))
    return {
        "rows": {name: _figures(row) for name, row in rows.items()},
        "speed_ratio_best": statistics.median(a / b for a, b in zip(speeds, best.values(), strict=True)),
        "ratio_by_round": [round(a / b, 3) for a, b in zip(speeds, best.values(), strict=True)],
        "ratio_mean": geometric(speeds, list(best.values())),
        "over": {
            name: spread_json(Spread.of([_speed(turn) / _speed(rows[name].turns[n]) for n, turn in ours.items()]), 3)
            for name in BEST
        },
        "maps_over_routers": {
            kind.policy: spread_json(Spread.of(_ratios(rows[kind.name], rows[kind.policy])), 3)
            for kind in MAPPED
            if kind.name in rows
        },
        "bare_over_look_ahead": spread_json(Spread.of(_ratios(rows[BARE.name], rows["look-ahead"])), 3),
        "rounds": len(ours),
        "tokens": first.tokens,
        "prompt_rows": sum(len(ask.prompt_ids) for ask in asks),
        "same_answers": all(next(iter(row.turns.values())).ids == first.ids for row in rows.values()),
    }


def _ratios(row: Row, base: Row) -> list[float]:
    """Tokens/s of one over the other, by round."""
    return [_speed(turn) / _speed(base.turns[number]) for number, turn in row.turns.items()]


def _speed(turn: ServedTurn) -> float:
    return turn.tokens / turn.seconds


def _figures(row: Row) -> dict[str, Any]:
    """Shares of the link: its bytes a second in the steps of a phase, over what the disk gave in the same turn."""
    turns = list(row.turns.values())
    tokens, prefetches = sum(turn.tokens for turn in turns), sum(turn.prefetches for turn in turns)
    return {
        "tokens_per_s": spread_json(Spread.of([_speed(turn) for turn in turns]), 2),
        "stall_ms_per_token": 1e3 * sum(turn.stall_seconds for turn in turns) / tokens,
        "mib_per_token": sum(turn.bytes_moved for turn in turns) / tokens / 2**20,
        "hit_rate": sum(turn.hits for turn in turns) / sum(turn.look_ups for turn in turns),
        "on_demand_per_token": sum(turn.on_demand for turn in turns) / tokens,
        "prefetches_per_token": prefetches / tokens,
        "used_per_token": sum(turn.prefetches_used for turn in turns) / tokens,
        "wasted_share": sum(turn.prefetches_wasted for turn in turns) / prefetches if prefetches else None,
        "link_gb_per_s": spread_json(Spread.of([turn.link / 1e9 for turn in turns if turn.link]), 2),
        "phases": {phase: _phase(turns, phase) for phase in ("prefill", "decode")},
    }


def _phase(turns: Sequence[ServedTurn], phase: str) -> dict[str, Any]:
    parts = [(turn.phases[phase], turn.link) for turn in turns]
    seconds = sum(part.seconds for part, _ in parts)
    return {
        "steps": sum(part.steps for part, _ in parts),
        "seconds_share": seconds / sum(turn.seconds for turn in turns),
        "stall_share": sum(part.stall_seconds for part, _ in parts) / seconds if seconds else None,
        "link_busy": spread_json(
            Spread.of([part.bytes_moved / link / part.seconds for part, link in parts if link and part.seconds]), 3
        ),
    }
