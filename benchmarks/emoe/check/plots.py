"""The picture of the simulator's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import curve, legend_below, panels_of, save, style_of, tidy


def draw_check(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Simulated over real, with intervals; within the dotted lines is within 15 %."""
    figure, panels = panels_of(1, 3, height=3.4)
    shown = (("throughput", "answers/s"), ("mean_latency_ms", "mean latency"), ("goodput", "goodput"))
    for panel, (key, label) in zip(panels, shown, strict=True):
        for place, arm in enumerate(dict.fromkeys(point["arm"] for point in points)):
            own = [point for point in points if point["arm"] == arm and point["ratio"][key] is not None]
            at = [point["load"] + 0.02 * place for point in own]
            style = {**style_of(place), "linestyle": "none", "capsize": 3, "label": arm}
            curve(panel, at, [point["ratio"][key] for point in own], **style)
        for level, dashes in ((0.85, ":"), (1.0, "-"), (1.15, ":")):
            panel.axhline(level, color="0.5", linewidth=1, linestyle=dashes)
        panel.set_xlabel("arrivals, × saturation")
        panel.set_title(label, fontsize=10)
        panel.set_xticks(list(dict.fromkeys(point["load"] for point in points)))
        panel.margins(x=0.2)
        tidy(panel)
    panels[0].set_ylabel("simulated over real")
    figure.suptitle("the simulator beside real servers, on the same requests", fontsize=11)
    legend_below(figure, panels[:1])
    save(figure, path)
