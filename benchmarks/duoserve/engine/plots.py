"""The stage's picture: speed by policy, a prompt's time beside what bounds it, and each change by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy

_SPEEDS = {"one": "widened, one", "many": "widened, many", "random_one": "random, one", "random_many": "random, many"}


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(1, 3, height=3.4)
    _speeds(panels[0], found)
    _prompts(panels[1], found["prompts"])
    _ablation(panels[2], found["ablation"])
    for panel in panels:
        panel.tick_params(axis="x", labelsize=7)
        tidy(panel)
    legend_below(figure, panels[:2])
    save(figure, path)


def _speeds(panel: Any, found: Mapping[str, Any]) -> None:
    """Tokens/s over the better of the others, by round."""
    own = {label: found[name] for name, label in _SPEEDS.items() if "error" not in found[name]}
    for place, part in enumerate(own.values()):
        ratios = part["ratio_by_round"]
        panel.plot([place] * len(ratios), ratios, "o", color="#0072b2", alpha=0.6, markersize=4)
        panel.plot([place], [part["speed_ratio_best"]], "_", color="black", markersize=16)
    panel.set_xticks(range(len(own)), [label.replace(", ", ",\n") for label in own])
    panel.axhline(1, color="grey", linewidth=0.8)
    panel.set_title("tokens/s over the better of\nlook-ahead and reuse, by round", fontsize=9)


def _prompts(panel: Any, own: Mapping[str, Any]) -> None:
    if "error" in own:
        return
    lengths = list(dict.fromkeys(cell["rows"] for cell in own["cells"]))
    arms: dict[str, list[Any]] = {}
    for cell in own["cells"]:
        arms.setdefault(cell["arm"], []).append(cell["seconds"])
        if cell["arm"] == own["cells"][0]["arm"]:
            arms.setdefault("resident", []).append(cell["resident_seconds"])
            arms.setdefault("its bytes ÷ link", []).append(cell["link_seconds"])
    grouped_bars(panel, [f"{length} rows" for length in lengths], arms)
    panel.set_title("a prompt, seconds", fontsize=9)


def _ablation(panel: Any, own: Mapping[str, Any]) -> None:
    if "error" in own:
        return
    names = [name for name in own["rows"] if name != "duoserve"]
    for place, name in enumerate(names):
        for shift, part, colour in ((-0.2, "prompt", "#d55e00"), (0.0, "one", "#0072b2"), (0.2, "many", "#009e73")):
            spread = own["rows"][name][part]
            panel.plot([spread["min"], spread["max"]], [place + shift] * 2, color=colour, linewidth=1.5)
            panel.plot([spread["median"]], [place + shift], "o", color=colour, markersize=4,
                       label={"prompt": "prompt's time", "one": "tokens/s, one", "many": "tokens/s, many"}[part]
                       if not place else None)  # fmt: skip
    panel.set_yticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=7)
    panel.axvline(1, color="grey", linewidth=0.8)
    panel.set_ylim(-1.3, len(names) - 0.5)  # the legend is below all points
    panel.legend(fontsize=6, frameon=False, loc="lower right")
    panel.set_title("each change, over the whole", fontsize=9)
