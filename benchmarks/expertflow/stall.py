"""How long a token waits for experts by what is foretold, and without each part of the policy (Fig. 9's second half).

python -m benchmarks.expertflow --stage stall
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.expertflow.arms import KNOWN, LITERAL, LITERAL_KNOWN, OURS, REUSE, Arm
from benchmarks.expertflow.replay_jobs import MACHINES, Job, timed
from benchmarks.expertflow.routings import BUNDLED, Inputs, fitted_to, in_folder, worlds
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range

SHARE: Final = 1 / 3
COMPARED: Final = (REUSE, OURS, KNOWN)
ABLATIONS: Final = (
    Arm("duoserve", "duoserve"),
    Arm("without tokens", "expertflow"),
    Arm("without past", "expertflow", "tokens"),
    Arm("without router", "expertflow", "tokens and past", router=False),
    Arm("without correction", "expertflow", "tokens and past", corrected=False),
    LITERAL,
    LITERAL_KNOWN,
)
"""`duoserve` is what `expertflow` is without paths foretold, but for what it wants in steps with prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Inputs):
    """``rows``: replayed one by one, and ``many_rows`` ``at_once``. ``ablations``: whether they run too, with the first
    seed."""

    rows: int = 1200
    many_rows: int = 4800
    at_once: int = 8
    ablations: bool = True


QUICK = Scale(prompts=60, sequences=12, seeds=2, fit=QUICK_FIT, rows=60, many_rows=240)


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each its ``cells``, a replay each, and what they come to. On top the figures of ``trace``."""
    found: dict[str, Any] = {"models": []}
    for world in worlds(scale):
        with in_folder(world, fitted_to(world, scale.fit)) as folder:
            cells = in_parallel(timed, jobs(folder, scale), f"{world.name}: replays")
        own = {"model": world.name, "sequences": world.measured.sequences, "cells": cells, **figures(cells)}
        found["models"].append(own)
        if world.name != BUNDLED:
            found["path_stall_share"] = own["stall_share"]["median"]
            found["eight_time_ratio_reuse"] = own["many_time_ratio"]
    return found


def jobs(folder: Path, scale: Scale) -> list[Job]:
    """Those that take longest first."""
    many = [
        Job(folder, arm, machine, scale.at_once, SHARE, scale.many_rows, seed)
        for machine in MACHINES
        for seed in range(scale.seeds)
        for arm in (REUSE, OURS)
    ]
    alone = [
        Job(folder, arm, machine, 1, SHARE, scale.rows, seed)
        for machine in MACHINES
        for seed in range(scale.seeds)
        for arm in (*COMPARED, *(ABLATIONS if scale.ablations and seed == 0 else ()))
    ]
    return many + alone


def figures(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``shares``: of each machine and arm, what it takes of that part of `reuse`'s stall that known paths take, by
    seed. ``stall_share``: that of `expertflow`, the median of the machines, by seed. ``many_time_ratio``: time over
    `reuse`'s several at once, the median of the seeds, on the worst machine."""
    by_place = {(c["machine"], c["at_once"], c["seed"], c["arm"]): c for c in cells}
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, list[float]] = defaultdict(list)
    by_seed: dict[int, list[float]] = defaultdict(list)
    for (machine, at_once, seed, arm), cell in by_place.items():
        base = by_place[machine, at_once, seed, REUSE.name]
        if at_once > 1:
            if arm == OURS.name:
                ratios[machine].append(cell["ms"] / base["ms"])
            continue
        room = base["stall_ms"] - by_place[machine, 1, seed, KNOWN.name]["stall_ms"]
        if arm != REUSE.name and room > 0:
            shares[machine][arm].append((base["stall_ms"] - cell["stall_ms"]) / room)
            if arm == OURS.name:
                by_seed[seed].append(shares[machine][arm][-1])
    return {
        "shares": {m: {arm: spread_json(Spread.of(own), 3) for arm, own in of.items()} for m, of in shares.items()},
        "stall_share": spread_json(Spread.of([statistics.median(own) for own in by_seed.values()]))
        or {"median": None, "min": None, "max": None},
        "many_time_ratios": {machine: spread_json(Spread.of(own), 4) for machine, own in ratios.items()},
        "many_time_ratio": max(map(statistics.median, ratios.values()), default=None),
    }


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for own in found["models"]:
        first = own["cells"][-1]
        lines += [
            f"{own['model']}: {first['slots']} slots, experts of 12 MiB, {own['sequences']} sequences held out; "
            "a row one by one, the first seed",
            f"{'':<24}{'machine':>16}{'ready %':>9}{'stall ms':>10}{'ms':>9}{'MiB':>8}{'ahead':>8}{'used':>8}"
            f"{'share of what known paths take':>34}",
        ]
        lines += [_line(cell, own["shares"]) for cell in own["cells"] if cell["at_once"] == 1 and cell["seed"] == 0]
        for machine, ratio in own["many_time_ratios"].items():
            lines.append(f"several at once, {machine}: time over reuse's {median_range(ratio, 3)}")
        lines.append(f"median of the machines: {median_range(own['stall_share'])}" if own["shares"] else "no share")
    return "\n".join(lines)


def _line(cell: Mapping[str, Any], shares: Mapping[str, Any]) -> str:
    share = shares.get(cell["machine"], {}).get(cell["arm"])
    return (
        f"{cell['arm']:<24}{cell['machine']:>16}{100 * cell['ready_rate']:>9.1f}{cell['stall_ms']:>10.2f}"
        f"{cell['ms']:>9.2f}{cell['mib']:>8.0f}{cell['prefetches']:>8.1f}{cell['prefetches_used']:>8.1f}"
        f"{median_range(share):>34}"
    )


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(len(found["models"]), 1, height=3.4)
    for panel, own in zip(panels, found["models"], strict=True):
        cells = [cell for cell in own["cells"] if cell["at_once"] == 1 and cell["seed"] == 0]
        machines = list(dict.fromkeys(cell["machine"] for cell in cells))
        base = {cell["machine"]: cell["stall_ms"] for cell in cells if cell["arm"] == REUSE.name}
        arms: dict[str, list[dict[str, float]]] = {}
        for cell in cells:
            whole = base[cell["machine"]]
            arms.setdefault(cell["arm"], []).append({"mean": cell["stall_ms"] / whole if whole else 0.0})
        grouped_bars(panel, machines, arms)
        panel.set_ylabel("stall over reuse's")
        panel.set_title(own["model"], fontsize=9)
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
