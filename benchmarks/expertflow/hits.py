"""How many experts are there when they are needed, by how many fit and how many sequences run at once (Fig. 9).

python -m benchmarks.expertflow --stage hits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.expertflow.arms import KNOWN, LITERAL, LITERAL_KNOWN, OURS, REUSE, Arm
from benchmarks.expertflow.replay_jobs import Job, Machine, timed, untimed
from benchmarks.expertflow.routings import Inputs, fitted_to, in_folder, worlds
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.plots import curve, legend_below, panels_of, save, style_of, tidy

MACHINE: Final = Machine(6, 0.5)
SHARES: Final = (1 / 8, 1 / 4, 1 / 3, 1 / 2)
PLAIN: Final = tuple(Arm(name, name) for name in ("lru", "lfu", "lru-per-layer"))
ARMS: Final = (OURS, KNOWN, LITERAL, LITERAL_KNOWN, REUSE, *PLAIN)
BELADY: Final = Arm("Belady", "belady")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Inputs):
    """``rows``: replayed one by one, and ``many_rows`` ``at_once``."""

    rows: int = 600
    many_rows: int = 2400
    at_once: int = 8
    shares: tuple[float, ...] = SHARES


QUICK = Scale(prompts=60, sequences=12, fit=QUICK_FIT, rows=40, many_rows=200, shares=(1 / 4, 1 / 2))


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each its ``cells``, a policy on a cache each. ``ready_rate``: on the clock, with what is fetched
    ahead. ``hit_rate``: without."""
    found: dict[str, Any] = {"models": [], "machine": MACHINE.name}
    for world in worlds(scale):
        with in_folder(world, fitted_to(world, scale.fit)) as folder:
            on_clock = in_parallel(timed, jobs(folder, scale, ARMS), f"{world.name}: on the clock")
            still = in_parallel(untimed, jobs(folder, scale, (*ARMS, BELADY)), f"{world.name}: without time")
        ready = {place_of(cell): cell for cell in on_clock}
        cells = [{**ready.get(place_of(cell), {}), **cell} for cell in still]
        found["models"].append({"model": world.name, "sequences": world.measured.sequences, "cells": cells})
    return found


def jobs(folder: Path, scale: Scale, arms: Sequence[Arm]) -> list[Job]:
    """Those that take longest first."""
    return [
        Job(folder, arm, MACHINE, at_once, share, rows)
        for at_once, rows in ((scale.at_once, scale.many_rows), (1, scale.rows))
        for share in scale.shares
        for arm in arms
    ]


def place_of(cell: Mapping[str, Any]) -> tuple[str, int, float]:
    return cell["arm"], cell["at_once"], cell["share"]


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for own in found["models"]:
        by_place = {place_of(cell): cell for cell in own["cells"]}
        shares = list(dict.fromkeys(cell["share"] for cell in own["cells"]))
        for at_once in sorted({cell["at_once"] for cell in own["cells"]}):
            slots = [next(c["slots"] for c in own["cells"] if c["share"] == share) for share in shares]
            lines += [
                f"{own['model']}, {at_once} at once; ready on the clock ({found['machine']}) and hit without it, %",
                f"{'slots':<26}" + "".join(f"{count:>14}" for count in slots),
            ]
            for arm in dict.fromkeys(cell["arm"] for cell in own["cells"]):
                cells = [by_place[arm, at_once, share] for share in shares]
                lines.append(f"{arm:<26}" + "".join(f"{_pair(cell):>14}" for cell in cells))
    return "\n".join(lines)


def _pair(cell: Mapping[str, Any]) -> str:
    ready = "-" if "ready_rate" not in cell else f"{100 * cell['ready_rate']:.1f}"
    return f"{ready} / {100 * cell['hit_rate']:.1f}"


def draw(found: Mapping[str, Any], path: Path) -> None:
    places = [
        (own, at_once) for own in found["models"] for at_once in sorted({cell["at_once"] for cell in own["cells"]})
    ]
    figure, panels = panels_of(len(found["models"]), len(places) // len(found["models"]), height=3.2)
    for panel, (own, at_once) in zip(panels, places, strict=True):
        cells = [cell for cell in own["cells"] if cell["at_once"] == at_once]
        for number, arm in enumerate(dict.fromkeys(cell["arm"] for cell in cells)):
            of_arm = [cell for cell in cells if cell["arm"] == arm]
            rates = [{"mean": 100 * cell.get("ready_rate", cell["hit_rate"])} for cell in of_arm]
            line = {"linestyle": "--", "color": "black"} if arm == BELADY.name else style_of(number)
            curve(panel, [cell["slots"] for cell in of_arm], rates, label=arm, **line)
        panel.set_title(f"{own['model']}, {at_once} at once", fontsize=9)
        panel.set_xlabel("experts that fit")
        panel.set_ylabel("ready, %")
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
