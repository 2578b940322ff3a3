"""Pictures of a share of the experts: accuracy and time by share, and accuracy by task type."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import (
    curve,
    grouped_bars,
    legend_below,
    logarithmic,
    panels_of,
    save,
    style_of,
    tidy,
)


def draw_memory(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Memory, accuracy and latency against the share of experts (the paper's Figs 14-16).

    Several draws are shown with their range. Arms that were measured at one share are in the table.
    """
    figure, panels = panels_of(2, 2)
    shown = (
        ("experts_bytes", "experts in memory, GiB", 2.0**-30),
        ("right", "answers that are right", 1.0),
        ("agreement", "tokens as the resident model's", 1.0),
        ("latency_ratio", "time over the resident model's", 1.0),
    )
    whole = [row for row in rows if row["arm"] == "resident"]
    every = {row["beside"] for row in rows}
    names = [name for name in dict.fromkeys((row["arm"], row["fidelity"]) for row in rows if row["arm"] != "resident")
             if {row["beside"] for row in rows if (row["arm"], row["fidelity"]) == name} == every]  # fmt: skip
    for panel, (key, label, scale) in zip(panels, shown, strict=True):
        for place, name in enumerate(names):
            own = [row for row in rows if (row["arm"], row["fidelity"]) == name]
            shares = sorted({row["share"] for row in own})
            drawn = [[row[key] for row in own if row["share"] == share] for share in shares]
            curve(
                panel, [100 * share for share in shares],
                [{"mean": statistics.fmean(one), "min": min(one), "max": max(one)} for one in drawn], scale=scale,
                label=", ".join(name), linestyle="-" if name[1] == "paper" else "--", **style_of(place),
            )  # fmt: skip
        if whole:
            resident = scale * statistics.fmean(row[key] for row in whole)
            panel.plot([100], [resident], "k*", label="all resident", markersize=9)
        panel.set_xlabel("experts that fit, %")
        panel.set_ylabel(label)
        tidy(panel)
    logarithmic(panels[3])
    figure.suptitle("a share of the experts", fontsize=11)
    legend_below(figure, panels)
    save(figure, path)


def draw_memory_tasks(rows: Sequence[Mapping[str, Any]], share: float, path: Path) -> None:
    """Answers and tokens as the resident model's, by task type: task-aware against task-agnostic loading (the paper's
    Fig. 13), and against random draws."""
    shown = ("emoe-a", "emoe-a agnostic", "emoe-a binary", "static", "random")
    arms = {name: [row for row in rows if row["arm"] == name and row["beside"] == share and row["fidelity"] == "paper"]
            for name in shown}  # fmt: skip
    arms = {name: own for name, own in arms.items() if own}
    if not arms:
        return
    figure, panels = panels_of(2, 1, height=2.9)
    tasks = list(next(iter(arms.values()))[0]["same_by_task"])
    keys = (
        ("same_by_task", "answers as the resident model's"),
        ("agreement_by_task", "tokens as the resident model's"),
    )
    for panel, (key, label) in zip(panels, keys, strict=True):
        values = {
            name: [{"mean": statistics.fmean(row[key][task] or 0.0 for row in own)} for task in tasks]
            for name, own in arms.items()
        }
        grouped_bars(panel, tasks, values, ecolor="none")
        panel.set_ylabel(label)
        panel.set_ylim(0, 1.02)
        tidy(panel)
    figure.suptitle(f"by task type with {share:.0%} of the experts, every miss rerouted", fontsize=11)
    legend_below(figure, panels)
    save(figure, path)
