"""The stage's picture: throughput and switches of each system, beside what the simulation foretold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy


def draw(found: Mapping[str, Any], path: Path) -> None:
    if "skipped" in found:
        return
    figure, panels = panels_of(1, 3, height=3.4)
    rows = found["rows"]
    names = [name.replace(", ", ",\n").replace("-CoE", "") for name in rows]
    for panel, key, title in ((panels[0], "per_s", "requests a second"), (panels[1], "switches", "switches")):
        arms = {
            "real": [row[key] for row in rows.values()],
            "replayed": [{"mean": float(row["foretold"][key])} for row in rows.values()],
        }
        grouped_bars(panel, names, arms)
        panel.set_title(title, fontsize=9)
    line = found["line"]
    arms = {
        "real": [{"mean": row["p99_s"]} for row in line.values()],
        "replayed": [{"mean": row["foretold_p99_s"]} for row in line.values()],
    }
    grouped_bars(panels[2], [name.replace(", ", ",\n") for name in line], arms)
    panels[2].set_title(f"p99 of a line of {found['line_rate']:.0f}/s, s", fontsize=9)
    for panel in panels:
        panel.tick_params(axis="x", labelsize=6)
        tidy(panel)
    legend_below(figure, panels[:1])
    save(figure, path)
