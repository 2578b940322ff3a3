"""Pictures of the sweeps: latency and goodput by arrival rate, by task type, and by the share of right labels."""

from __future__ import annotations

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


def draw_sweep(steps: Sequence[Mapping[str, Any]], saturation: float, title: str, path: Path) -> None:
    """Mean latency (the paper's Fig. 12), goodput, and the share in time, against the arrival rate."""
    figure, panels = panels_of(1, 3, width=5.4)
    shown = (
        ("mean_latency_ms", "mean latency, s", 1e-3),
        ("goodput", "goodput, requests/s in time", 1.0),
        ("attainment", "share of requests in time", 1.0),
    )
    for panel, (key, label, scale) in zip(panels, shown, strict=True):
        for place, arm in enumerate(steps[0]["arms"]):
            points = [(step["load"], step["arms"][arm][key]) for step in steps if arm in step["arms"]]
            points = [(load, value) for load, value in points if value is not None]
            beside = 0.006 * (place - (len(steps[0]["arms"]) - 1) / 2)  # so that intervals do not hide one another
            at = [(load + beside) * saturation for load, _ in points]
            curve(panel, at, [value for _, value in points], scale=scale, label=arm, **style_of(place))
        panel.axvline(saturation, color="0.5", linewidth=1, linestyle=":")
        panel.set_xlabel("arrivals/s (dotted: what saturates FCFS)")
        panel.set_ylabel(label)
        means = [scale * row[key]["mean"] for step in steps for row in step["arms"].values() if row[key] is not None]
        if key == "mean_latency_ms":
            logarithmic(panel)
            panel.set_ylim(0.5 * min(means, default=0.1), 2 * max(means, default=1.0))
        else:
            _from_nothing(panel, means, share=key == "attainment")
        tidy(panel)
    _finish(figure, panels[:1], title, path)


def draw_tasks(step: Mapping[str, Any], path: Path) -> None:
    """Share in time and goodput by task type at one load."""
    figure, panels = panels_of(1, 2, width=7.5)
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
    figure, panels = panels_of(1, 3, width=5.4)
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
    panel.tick_params(axis="x", labelsize=9)
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
