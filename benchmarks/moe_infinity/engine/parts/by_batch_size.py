"""Fig. 6: latency a token against the batch size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from benchmarks.harness.inputs.task_prompts import mixed, shortened
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns, rotated
from benchmarks.moe_infinity.engine.arms.compared_policies import DISK_OFFLOAD
from benchmarks.moe_infinity.engine.parts.by_request_rate import Answer


def run(
    fleet: Fleet, names: Sequence[str], peer: Answer | None, *, sizes: Sequence[int], tokens: int, rounds: int,
    peer_rounds: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Batches of each size begin together; ``tokens`` are generated for each prompt, the beginning of a longer answer.

    Each round has other prompts, which are the same for all arms of these ``names``.
    """
    turns: dict[int, dict[str, list[ServedTurn]]] = {size: {name: [] for name in names} for size in sizes}
    total = len(sizes) * (rounds * len(names) + peer_rounds * (peer is not None))
    errors: dict[int, str] = {}
    with progress(total, "batch sizes", "batch") as bar:
        for round_, size in in_turns(sizes, rounds, seconds, warm_up=False):
            for name in rotated(names, round_):
                asks = long_enough(fleet.shared, size, tokens, round_)
                turns[size][name].append(fleet[name].run(asks, size))
                bar.update()
        for round_, size in product(range(1, peer_rounds + 1), sizes if peer is not None else ()):
            assert peer is not None
            try:
                if not errors:
                    turn = peer(long_enough(fleet.shared, size, tokens, round_))
                    turns[size].setdefault(DISK_OFFLOAD, []).append(turn)
            except ArmFailed as failed:
                errors[size] = str(failed)
            bar.update()
    return {"points": [_point(size, own, errors.get(size)) for size, own in turns.items()], "tokens": tokens}


def long_enough(shared: SharedModel, count: int, tokens: int, seed: int) -> list[Ask]:
    """Prompts whose right answers have at least so many tokens, cut to that number."""
    found: list[Ask] = []
    drawn = count
    while len(found) < count:
        drawn *= 2
        found = [ask for ask in mixed(shared, drawn, seed) if len(ask.answer_ids) >= tokens]
    return shortened(found[:count], tokens)


def _point(size: int, turns: dict[str, list[ServedTurn]], error: str | None) -> dict[str, Any]:
    rows = {}
    for name, own in turns.items():
        if own:
            made = sum(turn.tokens for turn in own)
            rows[name] = {
                "ms_per_token": spread_json(Spread.of([1e3 * statistics.fmean(turn.per_token) for turn in own])),
                "tokens_per_s": spread_json(Spread.of([turn.tokens / turn.seconds for turn in own])),
                "stall_ms_per_token": 1e3 * sum(turn.stall_seconds for turn in own) / made,
                "mib_per_token": sum(turn.bytes_moved for turn in own) / made / 2**20,
                "hit_rate": sum(turn.hits for turn in own) / max(1, sum(turn.look_ups for turn in own)),
            }
    return {"size": size, "rows": rows, "accelerate_error": error}
