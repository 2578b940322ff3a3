"""The picture of Table 3: what each predictor names, by model and by how far ahead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.duoserve.table3.tables import MEASURES
from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy
from greenroom.core.artifacts.path_file import LAYERS_AHEAD


def draw(found: Mapping[str, Any], path: Path) -> None:
    models = found["models"]
    distances = range(1, LAYERS_AHEAD + 1)
    figure, panels = panels_of(len(models), len(distances), height=3.2)
    cells = [(own, ahead) for own in models for ahead in distances]
    for panel, (own, ahead) in zip(panels, cells, strict=True):
        arms = {
            row["predictor"]: [{"mean": 100 * row[name]} for name in MEASURES]
            for row in own["rows"]
            if row["ahead"] == ahead
        }
        grouped_bars(panel, list(MEASURES.values()), arms)
        panel.set_ylim(0, 100)
        panel.set_title(f"{own['model']}, {ahead} ahead", fontsize=9)
        panel.set_ylabel("of picks in a layer named, %")
        panel.tick_params(axis="x", labelsize=8)
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
