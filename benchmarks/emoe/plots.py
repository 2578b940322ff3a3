"""The figures as pictures, beside the tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#8C510A")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")


def draw_sweep(steps: Sequence[Mapping[str, Any]], saturation: float, title: str, path: Path) -> None:
    """Mean latency (the paper's Fig. 12), goodput, and the share in time, against the arrival rate."""
    figure, panels = _figure(3)
    for panel, (key, label) in zip(
        panels, (("mean_latency_ms", "mean latency, s"), ("goodput", "goodput, requests/s in time"),
                 ("attainment", "share of requests in time")), strict=True,
    ):  # fmt: skip
        scale = 1e-3 if key == "mean_latency_ms" else 1.0
        for place, arm in enumerate(steps[0]["arms"]):
            points = [(step["load"], step["arms"][arm][key]) for step in steps if arm in step["arms"]]
            points = [(load, value) for load, value in points if value is not None]
            beside = 0.006 * (place - (len(steps[0]["arms"]) - 1) / 2)  # so that intervals do not hide one another
            panel.errorbar(
                [(load + beside) * saturation for load, _ in points], [scale * value["mean"] for _, value in points],
                yerr=[scale * value["within"] for _, value in points], label=arm, capsize=2, linewidth=1.5,
                markersize=4, color=_COLOURS[place % len(_COLOURS)], marker=_MARKERS[place % len(_MARKERS)],
            )  # fmt: skip
        panel.axvline(saturation, color="0.5", linewidth=1, linestyle=":")
        panel.set_xlabel("arrivals/s (dotted: what saturates FCFS)")
        panel.set_ylabel(label)
        means = [scale * row[key]["mean"] for step in steps for row in step["arms"].values() if row[key] is not None]
        if key == "mean_latency_ms":
            _logarithmic(panel)
            panel.set_ylim(0.5 * min(means, default=0.1), 2 * max(means, default=1.0))
        else:
            _from_nothing(panel, means, share=key == "attainment")
        _tidy(panel)
    _finish(figure, panels[0], title, path)


def draw_tasks(step: Mapping[str, Any], path: Path) -> None:
    """Share in time and goodput by task type at one load."""
    figure, panels = _figure(2, width=7.5)
    arms = list(step["arms"])
    tasks = list(step["arms"][arms[0]]["by_task"])
    width = 0.8 / len(arms)
    shown = (("attainment", "share in time"), ("goodput", "in time, requests/s"))
    for panel, (key, label) in zip(panels, shown, strict=True):
        for place, arm in enumerate(arms):
            values = [step["arms"][arm]["by_task"][task][key] for task in tasks]
            panel.bar(
                [number + (place - (len(arms) - 1) / 2) * width for number in range(len(tasks))],
                [value["mean"] for value in values], width, yerr=[value["within"] for value in values], label=arm,
                color=_COLOURS[place % len(_COLOURS)], ecolor="0.45", error_kw={"linewidth": 0.9},
            )  # fmt: skip
        panel.set_xticks(range(len(tasks)), tasks)
        panel.set_ylabel(label)
        means = [row["by_task"][task][key]["mean"] for row in step["arms"].values() for task in tasks]
        _from_nothing(panel, means, share=key == "attainment")
        _tidy(panel)
    _finish(figure, panels[0], f"schedulers, simulated, by task type at {step['load']:g} × saturation", path)


def draw_labels(labels: Mapping[str, Any], load: float, path: Path) -> None:
    """The paper's Fig. 19, and beside it its Fig. 13: task-aware against task-agnostic, by task."""
    figure, panels = _figure(3)
    steps, without = labels["by_accuracy"], labels["without_labels"]
    for panel, (key, label) in zip(
        panels[:2], (("latency_change_percent", "mean latency, % over right labels"),
                     ("goodput", "goodput, requests/s in time")), strict=True,
    ):  # fmt: skip
        panel.errorbar(
            [100 * step["accuracy"] for step in steps], [step[key]["mean"] for step in steps],
            yerr=[step[key]["within"] for step in steps], marker="o", capsize=2, color=_COLOURS[0],
            label="emoe, labels",
        )  # fmt: skip
        if without:
            mean, within = without[key]["mean"], without[key]["within"]
            panel.axhline(mean, color=_COLOURS[1], linestyle=":", label="emoe, no labels at all")
            panel.axhspan(mean - within, mean + within, color=_COLOURS[1], alpha=0.12, linewidth=0)
        panel.set_xlabel("labels that are right, %")
        panel.set_ylabel(label)
        _tidy(panel)
    _by_task(panels[2], steps[0]["by_task"], without["by_task"] if without else None)
    _finish(figure, panels[0], f"task classification, simulated, at {load:g} × saturation", path)


def _by_task(panel: Any, aware: Mapping[str, Any], agnostic: Mapping[str, Any] | None) -> None:
    """Mean latency with right labels beside that without any."""
    for place, of in enumerate(one for one in (aware, agnostic) if one is not None):
        values = [one["mean_latency_ms"] for one in of.values()]
        panel.bar(
            [number + 0.38 * (place - 0.5) for number in range(len(values))],
            [1e-3 * value["mean"] for value in values], 0.36, yerr=[1e-3 * value["within"] for value in values],
            color=_COLOURS[place], capsize=2, error_kw={"linewidth": 0.8},
        )  # fmt: skip
    panel.set_xticks(range(len(aware)), list(aware), fontsize=9)
    panel.set_ylabel("mean latency, s: right labels, none")
    _from_nothing(
        panel, [1e-3 * one["mean_latency_ms"]["mean"] for one in (*aware.values(), *(agnostic or {}).values())]
    )
    _tidy(panel)


def draw_memory(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Memory, accuracy and latency against the share of experts (the paper's Figs 14-16); several draws with their
    range. Arms that were measured at one share are in the table."""
    figure, panels = _figure(4)
    shown = (
        ("experts_bytes", "experts in memory, GiB", 2.0**-30),
        ("right", "answers that are right", 1.0),
        ("agreement", "tokens as the resident model's", 1.0),
        ("latency_ratio", "time over the resident model's", 1.0),
    )
    whole = [row for row in rows if row["arm"] == "resident"]
    every = {row["beside"] for row in rows}
    names = [name for name in dict.fromkeys((row["arm"], row["fidelity"]) for row in rows if row["arm"] != "resident")
             if {row["beside"] for row in rows if (row["arm"], row["fidelity"]) == name} == every]  # fmt: skip
    for panel, (key, label, scale) in zip(panels, shown, strict=True):
        for place, name in enumerate(names):
            own = [row for row in rows if (row["arm"], row["fidelity"]) == name]
            shares = sorted({row["share"] for row in own})
            drawn = [[scale * row[key] for row in own if row["share"] == share] for share in shares]
            means = [statistics.fmean(values) for values in drawn]
            below = [mean - min(values) for mean, values in zip(means, drawn, strict=True)]
            above = [max(values) - mean for mean, values in zip(means, drawn, strict=True)]
            panel.errorbar(
                [100 * share for share in shares], means, yerr=[below, above] if any(above) else None,
                label=", ".join(name), capsize=2, color=_COLOURS[place % len(_COLOURS)],
                marker=_MARKERS[place % len(_MARKERS)], markersize=4,
                linestyle="-" if name[1] == "paper" else "--",
            )  # fmt: skip
        if whole:
            resident = scale * statistics.fmean(row[key] for row in whole)
            panel.plot([100], [resident], "k*", label="all resident", markersize=9)
        panel.set_xlabel("experts that fit, %")
        panel.set_ylabel(label)
        _tidy(panel)
    _logarithmic(panels[3])
    _finish(figure, panels[0], "a share of the experts", path)


def draw_memory_tasks(rows: Sequence[Mapping[str, Any]], share: float, path: Path) -> None:
    """Answers and tokens as the resident model's, by task type: task-aware against task-agnostic loading (the paper's
    Fig. 13), and against random draws."""
    shown = ("emoe-a", "emoe-a agnostic", "emoe-a binary", "static", "random")
    arms = {name: [row for row in rows if row["arm"] == name and row["beside"] == share and row["fidelity"] == "paper"]
            for name in shown}  # fmt: skip
    arms = {name: own for name, own in arms.items() if own}
    if not arms:
        return
    figure, panels = _figure(2, width=7.5)
    tasks = list(next(iter(arms.values()))[0]["same_by_task"])
    width = 0.8 / len(arms)
    keys = (
        ("same_by_task", "answers as the resident model's"),
        ("agreement_by_task", "tokens as the resident model's"),
    )
    for panel, (key, label) in zip(panels, keys, strict=True):
        for place, (name, own) in enumerate(arms.items()):
            values = [statistics.fmean(row[key][task] or 0.0 for row in own) for task in tasks]
            where = [number + (place - (len(arms) - 1) / 2) * width for number in range(len(tasks))]
            panel.bar(where, values, width, label=name, color=_COLOURS[place])
        panel.set_xticks(range(len(tasks)), tasks)
        panel.set_ylabel(label)
        panel.set_ylim(0, 1.02)
        _tidy(panel)
    _finish(figure, panels[0], f"by task type with {share:.0%} of the experts, every miss rerouted", path)


def draw_check(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Simulated over real, with intervals; within the dotted lines is within 15 %."""
    figure, panels = _figure(3)
    shown = (("throughput", "answers/s"), ("mean_latency_ms", "mean latency"), ("goodput", "goodput"))
    for panel, (key, label) in zip(panels, shown, strict=True):
        for place, arm in enumerate(dict.fromkeys(point["arm"] for point in points)):
            own = [point for point in points if point["arm"] == arm and point["ratio"][key] is not None]
            panel.errorbar(
                [point["load"] + 0.02 * place for point in own], [point["ratio"][key]["mean"] for point in own],
                yerr=[
                    [point["ratio"][key]["mean"] - point["ratio"][key]["low"] for point in own],
                    [point["ratio"][key]["high"] - point["ratio"][key]["mean"] for point in own],
                ],
                label=arm, color=_COLOURS[place % len(_COLOURS)], marker=_MARKERS[place % len(_MARKERS)],
                linestyle="none", capsize=3,
            )  # fmt: skip
        for level, style in ((0.85, ":"), (1.0, "-"), (1.15, ":")):
            panel.axhline(level, color="0.5", linewidth=1, linestyle=style)
        panel.set_xlabel("arrivals, × saturation")
        panel.set_ylabel(f"{label}: simulated over real")
        _tidy(panel)
    _finish(figure, panels[0], "the simulator beside real servers, on the same requests", path)


def _figure(panels: int, *, width: float = 5.4) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, panels, figsize=(width * panels, 4.6), squeeze=True)


def _from_nothing(panel: Any, means: Sequence[float], *, share: bool = False) -> None:
    """From 0 on, as high as what is shown; where there are few seeds an interval may go on beyond the edge."""
    panel.set_ylim(0, 1.0 if share else 1.4 * max(means, default=0.0) or 1.0)


def _logarithmic(panel: Any) -> None:
    """With ticks as people write numbers."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_locator(LogLocator(subs=()))


def _tidy(panel: Any) -> None:
    panel.grid(True, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _finish(figure: Any, panel: Any, title: str, path: Path) -> None:
    from matplotlib import pyplot

    handles, labels = panel.get_legend_handles_labels()
    figure.suptitle(title, fontsize=11)
    figure.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06 + 0.04 * ((len(labels) - 1) // 4), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
