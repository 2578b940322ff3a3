"""Distinct experts of two batches, by how their rows were divided (Table 3)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from benchmarks.harness.inputs.split_routing import World
from benchmarks.harness.reporting.progress import each
from benchmarks.harness.reporting.statistics import Spread, spread_json
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.expertflow.grouping import active_experts, grouped
from greenroom.replay.traces.scheduled_steps import true_paths

RANDOM, LITERAL, OURS, TRUE_LITERAL, TRUE = (
    "random", "literal", "ours", "literal, true paths", "ours, true paths"
)  # fmt: skip
ONE: Final = "one forward"


def distinct_experts(
    world: World, foretold: Scores, sizes: tuple[int, ...], draws: int, seeds: int
) -> list[dict[str, Any]]:
    """A row for each size: experts a layer of two batches of so many rows of different sequences, the mean of
    ``draws``, over ``seeds``. Groups are made by ``foretold[rows, N]``, of ``world.rows``, or by true paths; what they
    need is counted by true paths. ``share``: the saving by foretold paths over that by true ones.
    """
    found = []
    for size in sizes:
        runs = [
            _run(world, foretold, size, draws, seed)
            for seed in each(range(seeds), f"{world.name}: two batches of {size}", "seed")
        ]
        shares = [(run[RANDOM] - run[OURS]) / (run[RANDOM] - run[TRUE]) for run in runs]
        found.append(
            {
                "rows": size,
                "experts": {name: spread_json(Spread.of([run[name] for run in runs]), 3) for name in runs[0]},
                "share": spread_json(Spread.of(shares), 4),
            }
        )
    return found


def _run(world: World, foretold: Scores, size: int, draws: int, seed: int) -> dict[str, float]:
    random = np.random.default_rng([seed, size])
    sums = dict.fromkeys((RANDOM, LITERAL, OURS, TRUE_LITERAL, TRUE, ONE), 0.0)
    for number in range(draws):
        places = _drawn(world, 2 * size, random)
        half = len(places) // 2
        true, said = true_paths(world.measured, world.rows[places]), foretold[places]
        order = random.permutation(len(places))
        sizes = (half, len(places) - half)
        sums[RANDOM] += active_experts(true, [order[:half], order[half:]])
        sums[LITERAL] += active_experts(true, grouped(said, sizes, literal=True, seed=number))
        sums[OURS] += active_experts(true, grouped(said, sizes, seed=number))
        sums[TRUE_LITERAL] += active_experts(true, grouped(true, sizes, literal=True, seed=number))
        sums[TRUE] += active_experts(true, grouped(true, sizes, seed=number))
        sums[ONE] += active_experts(true, [order])
    return {name: total / draws / world.measured.layers for name, total in sums.items()}


def _drawn(world: World, rows: int, random: np.random.Generator) -> Ids:
    """Places in ``world.rows`` of as many different sequences, or of all where there are fewer."""
    owner = np.searchsorted(world.measured.seq_starts, world.rows, side="right")
    known, begins, counts = np.unique(owner, return_index=True, return_counts=True)
    chosen = random.choice(len(known), size=min(rows, len(known)), replace=False)
    places: Ids = begins[chosen] + random.integers(counts[chosen])
    return places
