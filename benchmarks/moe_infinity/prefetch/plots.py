"""The picture of prefetching: recall by experts a layer and by link, and the tails of the expert-ready latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import curve, page, save, tidy
from greenroom.core.pictures import COLOURS


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Fig. 9, then Fig. 10 of each model, then the tails of the expert-ready latency."""
    models = list(dict.fromkeys(row["model"] for row in found["bandwidth"]))
    recalls = 1 + len(models)
    rows = recalls // 2 + 1
    figure = page(4.0 * rows)
    grid = figure.add_gridspec(rows, 2)
    panels = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(recalls)]
    tails = figure.add_subplot(grid[-1, 1 if recalls % 2 else slice(None)])
    arms = dict.fromkeys(arm for row in (*found["experts"], *found["bandwidth"]) for arm in row["arms"])
    colours = dict(zip(arms, COLOURS, strict=False))
    _lines(panels[0], found["experts"], "experts", 1.0, "experts a layer, at PCIe 4.0", colours)
    for panel, model in zip(panels[1:], models, strict=False):
        own = [row for row in found["bandwidth"] if row["model"] == model]
        _lines(panel, own, "link", 1e-9, f"link, GB/s: {model}", colours)
    _tails(tails, found["latency"])
    save(figure, path)


def _lines(
    panel: Any, rows: Sequence[Mapping[str, Any]], key: str, unit: float, label: str, colours: Mapping[str, str]
) -> None:
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        own = [row for row in rows if arm in row["arms"]]
        recalls = [row["arms"][arm]["recall"] for row in own]
        curve(panel, [unit * row[key] for row in own], recalls, scale=100, label=arm, color=colours[arm], marker="o")
    panel.set_xscale("log", base=2)
    panel.set_xticks([unit * row[key] for row in rows], [f"{unit * row[key]:g}" for row in rows])
    panel.set_ylim(0, 100)
    panel.set_xlabel(label)
    panel.set_ylabel("recall of prefetching, %")
    tidy(panel)
    panel.legend(fontsize=9)


def _tails(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    arms = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    height = 0.8 / len(rows)
    for place, row in enumerate(rows):
        own = [(number, row["arms"][arm]["layer_p99_ms"]) for number, arm in enumerate(arms) if arm in row["arms"]]
        panel.barh(
            [number + place * height for number, _ in own], [value["mean"] for _, value in own], height,
            xerr=[value["within"] for _, value in own], color=COLOURS[place % len(COLOURS)],
            label=f"{row['model']}, {row['at_once']} at once",
        )  # fmt: skip
    panel.set_yticks([number + 0.4 for number in range(len(arms))], arms, fontsize=9)
    panel.set_xlabel("what a layer waits for its experts, p99, ms")
    panel.invert_yaxis()
    panel.legend(fontsize=9, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
