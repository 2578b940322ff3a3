"""The stage's two pictures: policies at a third of the experts, and latency a token by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import centre, curve, errors, legend_below, logarithmic, panels_of, save, tidy
from benchmarks.moe_infinity.engine.arms.compared_policies import DISK_OFFLOAD, KINDS, ORACLES
from greenroom.core.pictures import COLOURS

Found = Mapping[str, Any]
_NAMES = (*(kind.name for kind in KINDS), DISK_OFFLOAD, *(kind.name for kind in ORACLES))
_GREY = "0.3"


def draw(found: Found, path: Path) -> None:
    """``path`` gets the policies, a file beside it whose name ends in ``-load`` the loads. Raises PlotUnavailable.

    Parts that failed have empty panels.
    """
    figure, panels = panels_of(2, 2)
    _bars(panels[0], found, "tokens_per_s", "tokens/s, one at a time")
    _bars(panels[1], found, "stall_recovered", "share of LRU's waiting removed")
    _budgets(panels[2], found["budgets"].get("points", []))
    _tasks(panels[3], found)
    _finish(figure, panels, path)
    figure, panels = panels_of(2, 2)
    rates = found["rates"].get("points", [])
    _rates(panels[0], rates)
    _batches(panels[1], found["batches"].get("points", []))
    _distribution(panels[2], rates[:1], "low load")
    _distribution(panels[3], rates[-1:], "high load")
    _finish(figure, panels, path.with_stem(f"{path.stem}-load"))


def _finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    for panel in panels:
        tidy(panel)
    legend_below(figure, panels, 5)
    save(figure, path)


def _colour(name: str) -> str:
    return COLOURS[_NAMES.index(name)] if name in _NAMES[: len(COLOURS)] else _GREY


def _bars(panel: Any, found: Found, key: str, label: str) -> None:
    rows = {name: row[key] for name, row in found["one"].get("rows", {}).items() if row[key] is not None}
    for place, (name, value) in enumerate(rows.items()):
        panel.bar(place, centre(value), 0.7, yerr=errors([value]), color=_colour(name), ecolor="0.4", capsize=3)
    panel.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=9)
    panel.set_title(label)


def _lines(panel: Any, points: Sequence[Found], places: Sequence[float], key: str) -> None:
    for name in dict.fromkeys(name for point in points for name in point["rows"]):
        own = [
            (at, point["rows"][name][key]) for at, point in zip(places, points, strict=True) if name in point["rows"]
        ]
        dashes = "--" if name == DISK_OFFLOAD else "-"
        curve(panel, [at for at, _ in own], [value for _, value in own], label=name, color=_colour(name), marker="o",
              linestyle=dashes)  # fmt: skip
    if points:
        logarithmic(panel)


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
        logarithmic(panel, "x")
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
