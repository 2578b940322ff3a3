"""What is saved where rows run together that share experts (Table 3).

python -m benchmarks.expertflow --stage grouping
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.expertflow.grouping.rounds import MACHINE, RoundsJob, replayed
from benchmarks.expertflow.grouping.two_batches import distinct_experts
from benchmarks.expertflow.recall.foretellers import by_tables, past_logits
from benchmarks.expertflow.routings import BUNDLED, Inputs, fitted_to, in_folder, worlds
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.statistics import Spread, spread_json

Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Inputs):
    """``batches``: rows of each of two. ``draws``: of rows, a seed. ``rounds``: replayed. Bounded: ``bounded`` run, and
    a forward holds half. ``unbounded``: so many run. ``forced``: so many run in two groups by true paths."""

    seeds: int = 2
    batches: tuple[int, ...] = (8, 16, 32)
    draws: int = 150
    rounds: int = 150
    bounded: int = 32
    unbounded: tuple[int, ...] = (4, 8, 16, 32, 64)
    forced: tuple[int, ...] = (4, 8)


QUICK = Scale(
    prompts=60, sequences=24, seeds=1, fit=QUICK_FIT, batches=(4, 8), draws=20, rounds=20, bounded=8, unbounded=(4, 8),
    forced=(4,),
)  # fmt: skip


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each ``batches``, a size each, its replays as ``cells``, and what they come to. On top the figures
    of ``trace``."""
    found: dict[str, Any] = {"models": [], "machine": MACHINE.name}
    for world in worlds(scale):
        files, catalogue = fitted_to(world, scale.fit), world.measured.catalogue()
        foretold = by_tables(world, catalogue, files.paths, past_logits(world.measured, catalogue, files.reuse))
        batches = distinct_experts(world, np.asarray(foretold), scale.batches, scale.draws, scale.seeds)
        del foretold
        with in_folder(world, files) as folder:
            cells = in_parallel(replayed, jobs(folder, scale), f"{world.name}: replays")
        own = {"model": world.name, "batches": batches, "cells": cells, **ratios(cells, scale)}
        found["models"].append(own)
        if world.name != BUNDLED:
            found["grouping_share"] = min(row["share"]["median"] for row in batches)
            found["bounded_bytes_ratio"] = own["bounded"]["token-scheduler"]["median"]
            found["batching_time_ratio"] = max(ratio["median"] for ratio in own["unbounded"].values())
            found["grouped_bytes_ratio"] = max(ratio["median"] for ratio in own["forced"].values())
    return found


def jobs(folder: Path, scale: Scale) -> list[RoundsJob]:
    """Those that take longest first."""
    found = []
    for seed in range(scale.seeds):
        for known in (False, True):
            found += [
                RoundsJob(folder, batching, scale.bounded, scale.rounds, scale.bounded // 2, known, seed=seed)
                for batching in ("fcfs", "literal", "token-scheduler")
            ]
            found.append(
                RoundsJob(
                    folder, "token-scheduler", scale.bounded, scale.rounds, scale.bounded // 2, known, told=False,
                    seed=seed,
                )
            )  # fmt: skip
        for running in sorted(scale.unbounded, reverse=True):
            found += [
                RoundsJob(folder, batching, running, scale.rounds, seed=seed)
                for batching in ("fcfs", "token-scheduler", "forced")
            ]
        for running in scale.forced:
            found += [
                RoundsJob(folder, batching, running, scale.rounds, known=True, seed=seed)
                for batching in ("fcfs", "forced")
            ]
    return found


def ratios(cells: Cells, scale: Scale) -> dict[str, Any]:
    """Each over `fcfs` with the same seed. ``bounded``: bytes over those of fixed groups, by batching. ``unbounded``:
    by how many run, the time over that of one forward. ``across_steps``: bounded, the time where wants cross the border
    of steps over that where they do not. ``latency``: a round of two forced groups over that of one
    forward. ``forced``: bytes of two groups by true paths over those of one forward. ``forwards``: in a round, as
    chosen."""
    half, chosen = scale.bounded // 2, "token-scheduler"
    return {
        "bounded": {
            name + (", paths known" if known else ""): _over(cells, "mib", name, scale.bounded, half, known)
            for known in (False, True)
            for name in ("literal", "token-scheduler")
        },
        "across_steps": {
            "paths known" if known else "tables": _told_over_not(cells, scale.bounded, half, known)
            for known in (False, True)
        },
        "unbounded": {str(n): _over(cells, "ms", chosen, n) for n in scale.unbounded},
        "latency": {str(n): _over(cells, "round_ms", "forced", n) for n in scale.unbounded},
        "forced": {str(n): _over(cells, "mib", "forced", n, known=True) for n in scale.forced},
        "forwards": {
            str(n): statistics.fmean(c["forwards"] for c in _cells(cells, "token-scheduler", n))
            for n in scale.unbounded
        },
    }


def _over(
    cells: Cells, figure: str, batching: str, running: int, rows: int | None = None, known: bool = False
) -> dict[str, float]:
    return _ratio(figure, _cells(cells, batching, running, rows, known), _cells(cells, "fcfs", running, rows, known))


def _told_over_not(cells: Cells, running: int, rows: int, known: bool) -> dict[str, float]:
    told, untold = (_cells(cells, "token-scheduler", running, rows, known, told=one) for one in (True, False))
    return _ratio("ms", told, untold)


def _ratio(figure: str, ours: Cells, base: Cells) -> dict[str, float]:
    by_seed = {cell["seed"]: cell[figure] for cell in base}
    found = spread_json(Spread.of([cell[figure] / by_seed[cell["seed"]] for cell in ours]), 4)
    assert found is not None
    return found


def _cells(
    cells: Cells, batching: str, running: int, rows: int | None = None, known: bool = False, *, told: bool = True
) -> Cells:
    wanted = (batching, running, rows, known, told)
    return [c for c in cells if (c["batching"], c["running"], c["rows_per_forward"], c["known"], c["told"]) == wanted]
