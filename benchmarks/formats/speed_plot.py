"""The picture of tokens/s against bytes of memory for experts, all formats on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.formats.arms import BF16
from benchmarks.formats.figures import expert_memory
from benchmarks.harness.children.greenroom_child import CONCURRENCY
from benchmarks.harness.reporting.plots import curve, legend_below, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.statistics import spread_json
from benchmarks.harness.rows import Row
from greenroom.core.units import MIB


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for one request at a time and one for several. Raises PlotUnavailable."""
    figure, panels = panels_of(1, 2, height=4.2)
    for panel, concurrency in zip(panels, (1, CONCURRENCY), strict=True):
        _panel(panel, [row for row in rows if row.concurrency == concurrency and row.turns])
        panel.set_title("one request at a time" if concurrency == 1 else f"{concurrency} at once")
    legend_below(figure, panels, 4)
    save(figure, path)


def _panel(panel: Any, rows: Sequence[Row]) -> None:
    for place, name in enumerate(dict.fromkeys(row.model for row in rows)):
        for system, line in ((name, "-"), (BF16, ":")):
            own = sorted((row for row in rows if row.model == name and row.system == system), key=expert_memory)
            speeds = [(expert_memory(row) / MIB, speed) for row in own if (speed := spread_json(row.tokens_per_s))]
            label = name if system == name else f"{name} in {BF16}"
            style = {**style_of(place), "linestyle": line, "label": label}
            curve(panel, [at for at, _ in speeds], [speed for _, speed in speeds], **style)
    panel.set(xlabel="memory for experts (MiB)", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    tidy(panel)
