"""The stage's picture: what the tables say, panel by panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.moe_infinity.engine.kinds import DISK_OFFLOAD, KINDS, ORACLES
from greenroom.core.pictures import COLOURS, new_figure, save_figure

Found = Mapping[str, Any]
_NAMES = (*(kind.name for kind in KINDS), DISK_OFFLOAD, *(kind.name for kind in ORACLES))
_GREY = "0.3"


def draw(found: Found, path: Path) -> None:
    """Raises PlotUnavailable. Parts that failed have empty panels."""
    figure = new_figure(19.0, 9.0)
    panels = figure.subplots(2, 4).ravel()
    _bars(panels[0], found, "tokens_per_s", "tokens/s, one at a time")
    _bars(panels[1], found, "stall_recovered", "share of LRU's waiting removed")
    _rates(panels[2], found["rates"].get("points", []))
    _distribution(panels[3], found["rates"].get("points", [])[:1], "low load")
    _distribution(panels[4], found["rates"].get("points", [])[-1:], "high load")
    _batches(panels[5], found["batches"].get("points", []))
    _budgets(panels[6], found["budgets"].get("points", []))
    _tasks(panels[7], found)
    handles: dict[str, Any] = {}
    for panel in panels:
        panel.grid(True, color="0.92", linewidth=0.8)
        panel.set_axisbelow(True)
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=9, frameon=False)
    save_figure(figure, path)


def _colour(name: str) -> str:
    return COLOURS[_NAMES.index(name)] if name in _NAMES[: len(COLOURS)] else _GREY


def _bars(panel: Any, found: Found, key: str, label: str) -> None:
    rows = {name: row[key] for name, row in found["one"].get("rows", {}).items() if row[key] is not None}
    for place, (name, value) in enumerate(rows.items()):
        below, above = value["median"] - value["min"], value["max"] - value["median"]
        panel.bar(place, value["median"], 0.7, yerr=[[below], [above]], color=_colour(name), ecolor="0.4", capsize=3)
    panel.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
    panel.set_title(label)


def _lines(panel: Any, points: Sequence[Found], places: Sequence[float], key: str) -> None:
    for name in dict.fromkeys(name for point in points for name in point["rows"]):
        own = [
            (at, point["rows"][name][key]) for at, point in zip(places, points, strict=True) if name in point["rows"]
        ]
        panel.errorbar(
            [at for at, _ in own], [value["median"] for _, value in own],
            yerr=[[value["median"] - value["min"] for _, value in own],
                  [value["max"] - value["median"] for _, value in own]],
            label=name, color=_colour(name), marker="o", markersize=4, capsize=2, linewidth=1.4,
            linestyle="--" if name == DISK_OFFLOAD else "-",
        )  # fmt: skip
    if points:
        panel.set_yscale("log")
        plain_ticks(panel.yaxis)


def plain_ticks(axis: Any) -> None:
    """Of a logarithmic axis, as people write numbers."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(LogLocator(subs=()))


def _rates(panel: Any, points: Sequence[Found]) -> None:
    _lines(panel, points, [point["rate"] for point in points], "mean_ms")
    panel.set(title="Fig. 4: latency a token, ms", xlabel="requests/s")


def _batches(panel: Any, points: Sequence[Found]) -> None:
    _lines(panel, points, [point["size"] for point in points], "ms_per_token")
    panel.set(title="Fig. 6: latency a token, ms", xlabel="batch size")
    if points:
        panel.set_xscale("log", base=2)
        panel.set_xticks([point["size"] for point in points], [point["size"] for point in points])


def _budgets(panel: Any, points: Sequence[Found]) -> None:
    ordered = sorted(points, key=lambda point: float(point["share"]))
    _lines(panel, ordered, [100 * point["share"] for point in ordered], "over_resident")
    panel.set(title="Fig. 7: latency a token over the resident model's", xlabel="experts in memory, %")


def _distribution(panel: Any, points: Sequence[Found], title: str) -> None:
    for point in points:
        for name, row in point["rows"].items():
            values = row["per_token_ms"]
            shares = [(place + 1) / len(values) for place in range(len(values))]
            panel.step(values, shares, where="post", label=name, color=_colour(name), linewidth=1.4)
        panel.set_xscale("log")
        plain_ticks(panel.xaxis)
        title = f"{title}, {point['rate']:.2f} requests/s"
    panel.set(title=f"Fig. 5: {title}", xlabel="latency a token, ms", ylim=(0, 1.02))


def _tasks(panel: Any, found: Found) -> None:
    rows = {name: {task: one["mean"] for task, one in row["ms_per_token_by_task"].items()}
            for name, row in found["one"].get("rows", {}).items()}  # fmt: skip
    tasks = list(dict.fromkeys(task for row in rows.values() for task in row))
    width = 0.8 / max(1, len(rows))
    for place, (name, row) in enumerate(rows.items()):
        at = [number + (place - (len(rows) - 1) / 2) * width for number in range(len(tasks))]
        panel.bar(at, [row[task] for task in tasks], width, color=_colour(name), label=name)
    panel.set_xticks(range(len(tasks)), tasks)
    panel.set_title("Fig. 8: latency a token, ms")
