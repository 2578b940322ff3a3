"""How many members a collection needs: latency and recall against its capacity (MoE-Infinity, Fig. 12).

    python -m benchmarks.moe_infinity --stage capacity

Recall is that of prefetching alone, at PCIe 4.0 (see ``prefetch``). Latency is that of a token with a cache of the
paper's size, one sequence after the other. ± is half a 95 % interval over seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.reporting.plots import curve, panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import interval
from benchmarks.harness.reporting.tables import plus_minus
from benchmarks.moe_infinity.prefetch.cells import Arm, Cell, World, measure
from benchmarks.moe_infinity.simulated_models import MODELS, PCIE4_BYTES_PER_S
from greenroom.core.pictures import COLOURS
from greenroom.replay.sweeps.processes import in_processes

OURS: Final = Arm("moe-infinity", "moe-infinity")
PAPER_ENOUGH: Final = {"switch-large-128": 100, "nllb-moe-128": 110}
WITHIN: Final = 0.01
"""Of the recall of the largest collection: one that comes so near to it is large enough."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Members are chosen among ``learnt`` sequences; the ``served`` ones after them are replayed.

    Beside the ``capacities`` runs a policy without a collection, which only caches.
    """

    seeds: int = 4
    capacities: tuple[int, ...] = (1, 5, 10, 25, 50, 100, 200, 300)
    learnt: int = 600
    served: int = 24
    models: tuple[str, ...] = tuple(MODELS)
    jobs: int = len(os.sched_getaffinity(0))


QUICK = Scale(seeds=2, capacities=(1, 25, 100), learnt=120, served=3, models=("nllb-moe-128",))


@dataclass(frozen=True, slots=True)
class Point:
    """Of one seed."""

    recall: float
    token_ms: float


def run(scale: Scale) -> dict[str, Any]:
    """A row for each model and capacity. ``enough``: by model the capacity from which on recall stays."""
    seeds = range(scale.seeds)
    worlds = [
        World(MODELS[name], seed, scale.learnt, scale.served, capacity)
        for name in scale.models
        for seed in seeds
        for capacity in (0, *scale.capacities)
    ]
    with progress(len(worlds), "capacity") as bar:
        points = in_processes(measure_point, worlds, min(scale.jobs, len(worlds)), bar.update)
    found = {(one.model.name, one.capacity, one.seed): point for one, point in zip(worlds, points, strict=True)}
    rows = []
    for name in scale.models:
        for capacity in (0, *scale.capacities):
            own = [found[name, capacity, seed] for seed in seeds]
            ratios = [point.token_ms / found[name, 0, seed].token_ms for seed, point in zip(seeds, own, strict=True)]
            rows.append(
                {
                    "model": name,
                    "capacity": capacity,
                    "recall": interval([point.recall for point in own]),
                    "token_ms": interval([point.token_ms for point in own]),
                    "over_none": interval(ratios),
                }
            )
    sufficient = {name: enough([row for row in rows if row["model"] == name]) for name in scale.models}
    return {"rows": rows, "enough": sufficient, "paper_enough": PAPER_ENOUGH}


def measure_point(world: World, go_on: Callable[[], object] = lambda: None) -> Point:
    alone, kept = (measure(Cell(world, OURS, PCIE4_BYTES_PER_S, 1, alone), go_on) for alone in (True, False))
    assert alone.recall is not None, "alone it has one"
    return Point(alone.recall, kept.token_ms)


def enough(rows: list[dict[str, Any]]) -> int:
    """The least capacity from which on every recall is at most ``WITHIN`` below that of the largest."""
    rows = sorted(rows, key=lambda row: -row["capacity"])
    least = rows[0]
    for row in rows:
        if row["recall"]["mean"] < rows[0]["recall"]["mean"] - WITHIN:
            break
        least = row
    capacity: int = least["capacity"]
    return capacity


def table(found: Mapping[str, Any]) -> str:
    lines = [f"Fig. 12{'':<15}{'capacity':>10}{'recall, %':>18}{'ms a token':>18}{'over none':>18}"]
    for row in found["rows"]:
        columns = (("recall", 100, 1), ("token_ms", 1, 2), ("over_none", 1, 3))
        cells = [plus_minus(row[name], scale, digits) for name, scale, digits in columns]
        lines.append(f"{row['model']:<22}{row['capacity'] or 'none':>10}" + "".join(f"{cell:>18}" for cell in cells))
    for model, capacity in found["enough"].items():
        lines.append(f"{model}: {capacity} members are enough (paper: {found['paper_enough'].get(model, '-')})")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(1, 2)
    shown = (
        ("recall", 100, "recall of prefetching, %"),
        ("over_none", 1, "ms a token, over that without a collection"),
    )
    for panel, (key, scale, label) in zip(panels, shown, strict=True):
        for colour, model in zip(COLOURS, found["enough"], strict=False):
            rows = [row for row in found["rows"] if row["model"] == model]
            at, values = [row["capacity"] for row in rows], [row[key] for row in rows]
            curve(panel, at, values, scale=scale, label=model, color=colour, marker="o")
        panel.set_xlabel("members of the collection (0: none)")
        panel.set_ylabel(label)
        tidy(panel)
        panel.legend(fontsize=9)
    save(figure, path)
