"""Pictures of the stage: what each policy's p95 is over that of `fcfs`, and goodput against load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.duoserve.serving.arms import ARMS, BASE
from benchmarks.harness.reporting.plots import curve, grouped_bars, legend_below, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.statistics import interval

HALF = 0.5
OTHERS = [arm.name for arm in ARMS if arm is not BASE]
"""Bars and curves of an arm have the colour of its place here; the base comes after them."""
MISSING = {"mean": math.nan}


def draw(found: Mapping[str, Any], path: Path) -> None:
    machines = found["machines"]
    figure, panels = panels_of(len(machines), 3, height=3.0)
    for row, machine in enumerate(machines):
        ttft, tpot, goodput = panels[3 * row : 3 * row + 3]
        for panel, what in ((ttft, "ttft"), (tpot, "tpot")):
            _ratios(panel, machine, what)
            panel.set_title(f"{machine['machine']}\nhalf of saturation", fontsize=8)
            panel.set_ylabel(f"{what.upper()} p95 over that of fcfs")
        _goodput(goodput, machine)
        goodput.set_title(machine["machine"], fontsize=8)
    legend_below(figure, panels)
    save(figure, path)


def _ratios(panel: Any, machine: Mapping[str, Any], what: str) -> None:
    cells = {(cell["shorter"], cell["arm"]): cell for cell in machine["cells"] if cell["load"] == HALF}
    lengths = sorted({shorter for shorter, _ in cells})
    arms = {
        name: [_ratio(cells.get((shorter, name)), what) for shorter in lengths]
        for name in OTHERS[: 1 + max(OTHERS.index(arm) for _, arm in cells if arm in OTHERS)]
    }
    grouped_bars(panel, [f"lengths / {shorter:g}" for shorter in lengths], arms)
    panel.axhline(1.0, color="0.5", linewidth=1, linestyle=":")
    tidy(panel)


def _ratio(cell: Mapping[str, Any] | None, what: str) -> Mapping[str, float]:
    """What was not run, or ended with no figure, has no bar."""
    found: Mapping[str, float] = (cell["over_fcfs"][what]["p95"] if cell is not None else None) or MISSING
    return found


def _goodput(panel: Any, machine: Mapping[str, Any]) -> None:
    """Requests a second within their SLOs, of whole lengths."""
    shorter = min(cell["shorter"] for cell in machine["cells"])
    cells = [cell for cell in machine["cells"] if cell["shorter"] == shorter]
    swept = [arm.name for arm in ARMS if len([cell for cell in cells if cell["arm"] == arm.name]) > 1]
    for name in swept or [BASE.name]:
        own = [cell for cell in cells if cell["arm"] == name]
        values = [interval([run["goodput"] for run in cell["runs"]]) for cell in own]
        curve(panel, [cell["load"] for cell in own], values, label=name, **style_of([*OTHERS, BASE.name].index(name)))
    panel.set_xlabel("load, × saturation of fcfs")
    panel.set_ylabel("in time, requests/s")
    panel.set_ylim(0, None)
    tidy(panel)
