"""The figures of prefetching for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import plus_minus
from greenroom.core.pictures import COLOURS, new_figure, save_figure

_SHOWN = (
    ("ready", "ready", 100), ("mean_wait_ms", "mean ms", 1), ("p50_ms", "p50", 1), ("p95_ms", "p95", 1),
    ("p99_ms", "p99", 1), ("layer_p50_ms", "a layer: p50", 1), ("layer_p99_ms", "p99", 1),
    ("token_ms", "ms a token", 1), ("wasted", "wasted", 100),
)  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    lines = ["Fig. 9: recall of prefetching, %, at PCIe 4.0 (k: of the highest recall)"]
    lines += _recalls(found["experts"], lambda row: f"{row['experts']} experts")
    for model in dict.fromkeys(row["model"] for row in found["bandwidth"]):
        lines += ["", f"Fig. 10: the same against the link, {model}"]
        own = [row for row in found["bandwidth"] if row["model"] == model]
        lines += _recalls(own, lambda row: f"{row['link'] / 1e9:g} GB/s")
        lines += ["while decoding", *_recalls(own, lambda row: f"{row['link'] / 1e9:g} GB/s", "decoding")[1:]]
    for row in found["latency"]:
        link = found["link_of_latency"] / 1e9
        lines += ["", f"expert-ready latency, ms: {row['model']}, {row['at_once']} at once, {row['slots']} slots, "
                  f"{link:g} GB/s (ready and wasted: %)"]  # fmt: skip
        lines.append(f"{'':<26}" + "".join(f"{label:>15}" for _, label, _ in _SHOWN))
        for arm, values in row["arms"].items():
            lines.append(
                f"{arm:<26}" + "".join(f"{plus_minus(values[name], scale, 1):>15}" for name, _, scale in _SHOWN)
            )
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Fig. 9, then Fig. 10 of each model, then the tails of the expert-ready latency."""
    models = list(dict.fromkeys(row["model"] for row in found["bandwidth"]))
    columns = math.ceil((2 + len(models)) / 2)
    figure = new_figure(5 * columns, 9)
    panels = figure.subplots(2, columns).flatten()
    arms = dict.fromkeys(arm for row in (*found["experts"], *found["bandwidth"]) for arm in row["arms"])
    colours = dict(zip(arms, COLOURS, strict=False))
    _lines(panels[0], found["experts"], "experts", 1.0, "experts a layer, at PCIe 4.0", colours)
    for panel, model in zip(panels[1:], models, strict=False):
        own = [row for row in found["bandwidth"] if row["model"] == model]
        _lines(panel, own, "link", 1e-9, f"link, GB/s: {model}", colours)
    for panel in panels[1 + len(models) : -1]:
        panel.set_visible(False)
    _tails(panels[-1], found["latency"])
    save_figure(figure, path)


def _recalls(rows: Sequence[Mapping[str, Any]], named: Any, key: str = "recall") -> list[str]:
    arms = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    lines = [f"{'':<14}" + "".join(f"{arm:>22}" for arm in arms)]
    for row in rows:
        cells = []
        for arm in arms:
            value = row["arms"].get(arm)
            k = f" (k={value['k']})" if value is not None and "k" in value else ""
            cells.append("-" if value is None else plus_minus(value[key], 100, 1) + k)
        lines.append(f"{named(row):<14}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def _lines(
    panel: Any, rows: Sequence[Mapping[str, Any]], key: str, unit: float, label: str, colours: Mapping[str, str]
) -> None:
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        own = [row for row in rows if arm in row["arms"]]
        recalls = [row["arms"][arm]["recall"] for row in own]
        panel.errorbar(
            [unit * row[key] for row in own], [100 * value["mean"] for value in recalls],
            yerr=[100 * value["within"] for value in recalls], label=arm, color=colours[arm], marker="o", capsize=2,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks([unit * row[key] for row in rows], [f"{unit * row[key]:g}" for row in rows])
    panel.set_ylim(0, 100)
    panel.set_xlabel(label)
    panel.set_ylabel("recall of prefetching, %")
    panel.grid(True, color="0.9")
    panel.legend(fontsize=8)


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
    panel.set_yticks([number + 0.4 for number in range(len(arms))], arms, fontsize=8)
    panel.set_xlabel("what a layer waits for its experts, p99, ms")
    panel.invert_yaxis()
    panel.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
