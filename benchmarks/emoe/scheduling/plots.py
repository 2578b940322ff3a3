"""Pictures of the sweeps: latency and goodput by arrival rate, by task type, and by the share of right labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emoe.scheduling.schedulers import EMOE, EMOE_LITERAL, FCFS, HINDSIGHT
from benchmarks.harness.reporting.plots import (
    LineEnd,
    band,
    curve,
    grouped_bars,
    legend_below,
    logarithmic,
    name_ends,
    page,
    panels_of,
    save,
    style_of,
    tidy,
)
from greenroom.core.pictures import COLOURS

_MAIN = {FCFS: COLOURS[0], EMOE: COLOURS[1], EMOE_LITERAL: COLOURS[3], HINDSIGHT: "black"}
_OTHER = "0.55"


def draw_sweep(steps: Sequence[Mapping[str, Any]], saturation: float, title: str, path: Path) -> None:
    """Mean latency (the paper's Fig. 12), goodput, and the share in time, against the arrival rate.

    The main arms have colours, and shades as wide as their intervals.
    """
    figure, panels = panels_of(3, 1, height=2.9)
    shown = (
        ("mean_latency_ms", "mean latency, s", 1e-3),
        ("goodput", "in time, requests/s", 1.0),
        ("attainment", "share of requests in time", 1.0),
    )
    arms = sorted(steps[0]["arms"], key=lambda arm: arm in _MAIN)  # the main ones above the others
    for panel, (key, label, scale) in zip(panels, shown, strict=True):
        panel.axvline(1.0, color="0.5", linewidth=1, linestyle=":")
        panel.set_ylabel(label)
        means = [scale * row[key]["mean"] for step in steps for row in step["arms"].values() if row[key] is not None]
        if key == "mean_latency_ms":
            logarithmic(panel)
            panel.set_ylim(0.5 * min(means, default=0.1), 2 * max(means, default=1.0))
        else:
            _from_nothing(panel, means, share=key == "attainment")
        ends = [end for arm in arms if (end := _arm_line(panel, steps, arm, key, scale)) is not None]
        name_ends(panel, ends)
        panel.set_xticks([step["load"] for step in steps])
        tidy(panel)
    panels[-1].set_xlabel(f"arrivals, × what saturates FCFS ({saturation:.3g}/s)")
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _arm_line(panel: Any, steps: Sequence[Mapping[str, Any]], arm: str, key: str, scale: float) -> LineEnd | None:
    """None: it has no such figure at any load."""
    points = [(step["load"], step["arms"][arm][key]) for step in steps if arm in step["arms"]]
    points = [(load, value) for load, value in points if value is not None]
    if not points:
        return None
    at, values = [load for load, _ in points], [value for _, value in points]
    if arm in _MAIN:
        band(panel, at, values, scale=scale, color=_MAIN[arm], linestyle="--" if arm == HINDSIGHT else "-")
    else:
        panel.plot(at, [scale * value["mean"] for value in values], color=_OTHER, linewidth=0.8, marker=".")
    return LineEnd(arm, at[-1], scale * values[-1]["mean"], _MAIN.get(arm, _OTHER))


def draw_tasks(step: Mapping[str, Any], path: Path) -> None:
    """Share in time and goodput by task type at one load."""
    figure, panels = panels_of(2, 1, height=3.2)
    arms = list(step["arms"])
    tasks = list(step["arms"][arms[0]]["by_task"])
    shown = (("attainment", "share in time"), ("goodput", "in time, requests/s"))
    for panel, (key, label) in zip(panels, shown, strict=True):
        values = {arm: [step["arms"][arm]["by_task"][task][key] for task in tasks] for arm in arms}
        grouped_bars(panel, tasks, values)
        panel.set_ylabel(label)
        _from_nothing(panel, [one["mean"] for own in values.values() for one in own], share=key == "attainment")
        tidy(panel)
    _finish(figure, panels[:1], f"schedulers, simulated, by task type at {step['load']:g} × saturation", path)


def draw_labels(labels: Mapping[str, Any], load: float, path: Path) -> None:
    """The paper's Fig. 19, and beside it its Fig. 13: task-aware against task-agnostic, by task."""
    figure = page(6.6)
    places = figure.subplot_mosaic([["latency", "goodput"], ["tasks", "tasks"]])
    panels = [places[name] for name in ("latency", "goodput", "tasks")]
    steps, without = labels["by_accuracy"], labels["without_labels"]
    shown = (
        ("latency_change_percent", "mean latency, % over right labels"),
        ("goodput", "goodput, requests/s in time"),
    )
    with_labels, no_labels = style_of(0), style_of(1)["color"]
    for panel, (key, label) in zip(panels[:2], shown, strict=True):
        at = [100 * step["accuracy"] for step in steps]
        curve(panel, at, [step[key] for step in steps], label="emoe, labels", **with_labels)
        if without:
            mean, within = without[key]["mean"], without[key]["within"]
            panel.axhline(mean, color=no_labels, linestyle=":", label="emoe, no labels at all")
            panel.axhspan(mean - within, mean + within, color=no_labels, alpha=0.12, linewidth=0)
        panel.set_xlabel("labels that are right, %")
        panel.set_ylabel(label)
        tidy(panel)
    _by_task(panels[2], steps[0]["by_task"], without["by_task"] if without else None)
    _finish(figure, panels[:1], f"task classification, simulated, at {load:g} × saturation", path)


def _by_task(panel: Any, aware: Mapping[str, Any], agnostic: Mapping[str, Any] | None) -> None:
    """Mean latency with right labels beside that without any."""
    arms = {
        name: [{key: 1e-3 * one["mean_latency_ms"][key] for key in ("mean", "within")} for one in of.values()]
        for name, of in (("right labels", aware), ("none", agnostic))
        if of is not None
    }
    grouped_bars(panel, list(aware), arms)
    panel.set_ylabel("mean latency, s: right labels, none")
    _from_nothing(panel, [one["mean"] for own in arms.values() for one in own])
    tidy(panel)


def _from_nothing(panel: Any, means: Sequence[float], *, share: bool = False) -> None:
    """From 0 on, as high as what is shown; where there are few seeds an interval may go on beyond the edge."""
    panel.set_ylim(0, 1.0 if share else 1.4 * max(means, default=0.0) or 1.0)


def _finish(figure: Any, panels: Sequence[Any], title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    legend_below(figure, panels)
    save(figure, path)
