"""The picture of tokens/s beside the peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.reporting.plots import panels_of, save
from benchmarks.peers.results import GREENROOM, LLAMA, RESIDENT, SAME_TOTAL, STREAMING, THIRD, Row

_SITUATIONS = (
    "resident",
    "a third,\nsame bytes\nfor experts",
    "a third,\nsame total\nmemory",
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s as bars with the rounds' spread, a panel for each number of sequences. Raises PlotUnavailable."""
    models = list(dict.fromkeys(row.model for row in rows))
    situations = (RESIDENT, THIRD, SAME_TOTAL)
    colours = {GREENROOM: "#2f7d4f", LLAMA: "#8a8f98", STREAMING: "#b5793a"}
    figure, panels = panels_of(len(models), 2)
    for line, model in enumerate(models):
        for column, sequences in enumerate((1, 8)):
            axis = panels[2 * line + column]
            streams = any((row.engine, row.sequences) == (STREAMING, sequences) for row in rows)
            engines = (GREENROOM, LLAMA, STREAMING) if streams else (GREENROOM, LLAMA)
            step = 0.8 / len(engines)
            for number, engine in enumerate(engines):
                offset = (number - (len(engines) - 1) / 2) * step
                found = [
                    (place, row)
                    for place, memory in enumerate(situations)
                    for row in rows
                    if (row.model, row.engine, row.sequences) == (model, engine, sequences)
                    and row.samples
                    and (row.memory == memory or (engine == GREENROOM and memory == SAME_TOTAL and row.memory == THIRD))
                ]
                values = [row.tokens_per_s or 0.0 for _, row in found]
                rates = [[sample.tokens_per_s for sample in row.samples] for _, row in found]
                low = [value - min(each) for value, each in zip(values, rates, strict=True)]
                high = [max(each) - value for value, each in zip(values, rates, strict=True)]
                bars = axis.bar(
                    [place + offset for place, _ in found], values, 0.95 * step, yerr=[low, high], capsize=3,
                    label=engine, color=colours[engine],
                )  # fmt: skip
                axis.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=9, padding=2)
            axis.set_xticks(range(len(situations)), _SITUATIONS, fontsize=9)
            axis.set_title(f"{model}, {sequences} at once", fontsize=10)
            axis.set_ylabel("tokens/s (log)")
            if any(bar.get_height() > 0 for bar in axis.patches):  # of nothing there is no logarithm
                axis.set_yscale("log")
            axis.margins(y=0.2)
            axis.legend(fontsize=9)
    save(figure, path)
