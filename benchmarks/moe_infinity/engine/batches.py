"""Fig. 6: latency a token against the batch size."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.emoe.memory_arms import Ask, World
from benchmarks.engine.processes import ArmFailed
from benchmarks.engine.rows import Spread
from benchmarks.moe_infinity.engine.fleet import Fleet
from benchmarks.moe_infinity.engine.kinds import DISK_OFFLOAD
from benchmarks.moe_infinity.engine.prompts import mixed, shortened
from benchmarks.moe_infinity.engine.rates import Answer
from benchmarks.moe_infinity.engine.turns import ServedTurn, in_turns, spread


def run(
    fleet: Fleet, peer: Answer | None, *, sizes: Sequence[int], tokens: int, rounds: int, peer_rounds: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Batches of each size begin together and generate ``tokens`` each: the beginning of answers that are as long. Each
    round has other prompts; all arms the same."""
    points = []
    total = len(sizes) * (rounds * len(fleet.arms) + peer_rounds * (peer is not None))
    with tqdm(total=total, desc="batch sizes", unit="batch", disable=not sys.stderr.isatty()) as bar:
        for size in sizes:
            turns: dict[str, list[ServedTurn]] = {arm.kind.name: [] for arm in fleet.arms}
            for round_, arm in in_turns(fleet.arms, rounds, seconds / len(sizes), warm_up=False):
                turns[arm.kind.name].append(arm.run(long_enough(fleet.world, size, tokens, round_), size))
                bar.update()
            error = None
            for round_ in range(1, 1 + (0 if peer is None else peer_rounds)):
                try:
                    assert peer is not None
                    turn = peer(long_enough(fleet.world, size, tokens, round_))
                    turns.setdefault(DISK_OFFLOAD, []).append(turn)
                except ArmFailed as failed:
                    error, peer = str(failed), None
                bar.update()
            points.append(_point(size, turns, error))
    return {"points": points, "tokens": tokens}


def long_enough(world: World, count: int, tokens: int, seed: int) -> list[Ask]:
    """Prompts whose right answers have so many tokens, which these are cut to."""
    found: list[Ask] = []
    drawn = count
    while len(found) < count:
        drawn *= 2
        found = [ask for ask in mixed(world, drawn, seed) if len(ask.answer_ids) >= tokens]
    return shortened(found[:count], tokens)


def _point(size: int, turns: dict[str, list[ServedTurn]], error: str | None) -> dict[str, Any]:
    rows = {}
    for name, own in turns.items():
        if own:
            made = sum(turn.tokens for turn in own)
            rows[name] = {
                "ms_per_token": spread(Spread.of([1e3 * statistics.fmean(turn.per_token) for turn in own])),
                "tokens_per_s": spread(Spread.of([turn.tokens / turn.seconds for turn in own])),
                "stall_ms_per_token": 1e3 * sum(turn.stall_seconds for turn in own) / made,
                "mib_per_token": sum(turn.bytes_moved for turn in own) / made / 2**20,
                "hit_rate": sum(turn.hits for turn in own) / max(1, sum(turn.look_ups for turn in own)),
            }
    return {"size": size, "rows": rows, "accelerate_error": error}
