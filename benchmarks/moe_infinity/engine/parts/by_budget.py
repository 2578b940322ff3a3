"""Fig. 7 on one machine: latency a token against the experts' budget, and the smallest that meets a bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import SharedModel
from benchmarks.harness.inputs.task_prompts import in_turn
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns

WHOLE = Kind("resident", "lru")
BOUNDS = (1.5, 2.0, 3.0, 5.0)
"""Latencies a token that are asked for, as multiples of the resident model's."""


def run(
    shared: SharedModel, learnt: Learnt, kinds: Sequence[Kind], *, shares: Sequence[float], prompts: int, rounds: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """One prompt at a time. The arms of a share take turns, the resident model among them."""
    asks = in_turn(shared, prompts)
    whole = EngineArm(WHOLE, shared, 1.0)
    points = []
    total = len(shares) * (rounds + 1) * (len(kinds) + 1)
    try:
        with progress(total, "budgets", "turn") as bar:
            for share in shares:
                with Fleet(shared, learnt, share, kinds) as fleet:
                    arms = [whole, *fleet.arms]
                    turns: dict[str, list[ServedTurn]] = {arm.kind.name: [] for arm in arms}
                    for round_, arm in in_turns(arms, rounds, seconds / len(shares)):
                        turn = arm.run(asks, 1)
                        if round_:
                            turns[arm.kind.name].append(turn)
                        bar.update()
                    rows = {name: _figures(own, turns[WHOLE.name]) for name, own in turns.items()}
                    points.append({"share": share, "slots": fleet.arms[0].slots, "rows": rows})
    finally:
        whole.close()
        shared.detach()
    return {"points": points, "smallest": smallest(points)}


def _figures(turns: Sequence[ServedTurn], whole: Sequence[ServedTurn]) -> dict[str, Any]:
    """``over_resident``: round by round."""
    own, there = ([statistics.fmean(turn.per_token) for turn in some] for some in (turns, whole))
    return {
        "ms_per_token": spread_json(Spread.of([1e3 * one for one in own])),
        "over_resident": spread_json(Spread.of([one / other for one, other in zip(own, there, strict=True)])),
    }


def smallest(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """By bound and arm, see ``_smallest``."""
    names = dict.fromkeys(name for point in points for name in point["rows"])
    return {f"{bound:g}": {name: _smallest(points, name, bound) for name in names} for bound in BOUNDS}


def _smallest(points: Sequence[Mapping[str, Any]], name: str, bound: float) -> float | None:
    """The smallest share of those run that keeps the bound, as all larger ones do; None if the largest misses it."""
    best = None
    for point in sorted(points, key=lambda one: float(one["share"]), reverse=True):
        row = point["rows"].get(name)
        if row is None or row["over_resident"]["median"] > bound:
            break
        best = float(point["share"])
    return best
