"""Pictures of runs and sweeps, from their JSON: distributions, courses over time, goodput against rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.core.errors import GreenroomError
from greenroom_load.figures import FEW_SAMPLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
# Told apart by colour-blind people too (Okabe and Ito's palette), and by the dashes and markers in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_DOUBTFUL = " !"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


class PlotUnavailable(GreenroomError):
    """There is nothing to draw with, or nothing can be written there."""


def check_plots(prefix: Path) -> None:
    """Raises PlotUnavailable without matplotlib or without the folder: worth knowing before the long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotUnavailable("matplotlib is not installed; plots are drawn with: pip install 'greenroom[plot]'") from (
            error
        )
    if not prefix.absolute().parent.is_dir():
        raise PlotUnavailable(f"{prefix} can not be drawn: there is no folder {prefix.absolute().parent}")


def draw(results: Mapping[str, Json], prefix: Path, *, kind: str = "png") -> list[Path]:
    """The pictures that ``results``, by their names, give; the files written. Raises PlotUnavailable."""
    check_plots(prefix)
    runs = {name: result for name, result in results.items() if result["kind"].endswith("run")}
    sweeps = {name: result for name, result in results.items() if result["kind"].endswith("sweep")}
    drawn: list[Path] = []
    pictures: tuple[tuple[str, Mapping[str, Json], Callable[[Mapping[str, Json]], Figure]], ...] = (
        ("latency", {name: run for name, run in runs.items() if run["completed"]}, _latency),
        ("time", runs, _time),
        ("rate", {name: sweep for name, sweep in sweeps.items() if sweep["steps"]}, _rate),
    )
    for what, own, picture in pictures:
        if not own:
            continue
        path = prefix.with_name(f"{prefix.name}-{what}.{kind}")
        try:
            picture(own).savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise PlotUnavailable(f"{path} can not be drawn: {error}") from error
        drawn.append(path)
    if not drawn:
        raise PlotUnavailable("there is nothing to draw: no request completed")
    return drawn


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# --- how latencies are distributed


_LATENCIES = (("ttft_ms", "TTFT, ms"), ("itl_ms", "time between tokens, ms"), ("e2el_ms", "end to end, ms"))


def _latency(runs: Mapping[str, Json]) -> Figure:
    figure = _figure(12, 4.2)
    panels = figure.subplots(1, len(_LATENCIES), sharey=True)
    for panel, (key, label) in zip(panels, _LATENCIES, strict=True):
        for place, run in enumerate(runs.values()):
            own = run["distributions"]
            if key not in own:
                continue
            shares = [100 * step / own["steps"] for step in range(own["steps"] + 1)]
            panel.plot(own[key], shares, color=_colour(place), linewidth=1.8)
            intended = own.get(key.replace("_ms", "_intended_ms"))
            if intended is not None and _apart(own[key], intended):
                panel.plot(intended, shares, color=_colour(place), linewidth=1.3, linestyle=(0, (4, 2)))
        _logarithmic(panel, [run["distributions"].get(key, []) for run in runs.values()])
        panel.set_xlabel(label)
        panel.set_ylim(0, 100)
        for level in (50, 99):
            panel.axhline(level, color="0.6", linewidth=0.8, linestyle=":")
        _tidy(panel)
    panels[0].set_ylabel("requests or gaps up to it, %")
    _legend(figure, [_Entry(_run_name(name, run), _colour(place)) for place, (name, run) in enumerate(runs.items())],
            notes=_dashed(runs))  # fmt: skip
    return figure


def _dashed(runs: Mapping[str, Json]) -> list[str]:
    for run in runs.values():
        own = run["distributions"]
        for key in ("ttft_ms", "e2el_ms"):
            intended = own.get(key.replace("_ms", "_intended_ms"))
            if key in own and intended is not None and _apart(own[key], intended):
                return ["dashed: counted from when a request was to be sent"]
    return []


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two curves can be told from each other."""
    return any(abs(a - b) > 0.03 * max(a, b, 1e-9) + 2 for a, b in zip(one, other, strict=True))


def _logarithmic(panel: Axes, samples: Sequence[Sequence[float]]) -> None:
    """Where values span more than a factor of twenty; else from 0."""
    values = [value for own in samples for value in own if value > 0]
    if values and max(values) > 20 * _low(values):
        panel.set_xscale("log")
        panel.set_xlim(_low(values) / 1.3, max(values) * 1.3)
        panel.xaxis.set_major_formatter(_plain)
    else:
        panel.set_xlim(left=0)


def _low(values: Sequence[float]) -> float:
    """The smallest but for a few: one gap of nearly nothing should not fill half a picture."""
    return sorted(values)[len(values) // 100]


# --- over time


def _time(runs: Mapping[str, Json]) -> Figure:
    figure = _figure(9.5, 8.4)
    load, flight, first, gaps = figure.subplots(4, 1, sharex=True, height_ratios=(1, 1, 1.3, 1.3))
    floors = {
        key: _scale_y(panel, [run["series"][f"{key}_{level}_ms"] for run in runs.values() for level in ("p50", "p99")])
        for panel, key in ((first, "ttft"), (gaps, "itl"))
    }
    for place, run in enumerate(runs.values()):
        own, colour = run["series"], _colour(place)
        width = own["bin_s"]
        middles = [start + width / 2 for start in own["start_s"]]
        load.step(middles, [count / width for count in own["intended"]], where="mid", color=colour, linewidth=1.4)
        if any(own["failed"]):
            at = [(middle, count / width) for middle, count in zip(middles, own["failed"], strict=True) if count]
            load.plot(*zip(*at, strict=True), linestyle="none", marker="x", markersize=5, color=colour)
        flight.step(middles, own["in_flight"], where="mid", color=colour, linewidth=1.4)
        for panel, key in ((first, "ttft"), (gaps, "itl")):
            _course(panel, middles, own[f"{key}_p50_ms"], floors[key], color=colour, linestyle="-", linewidth=1.6)
            _course(
                panel, middles, own[f"{key}_p99_ms"], floors[key], color=colour, linestyle=(0, (4, 2)), linewidth=1.0
            )
    width = max(run["series"]["bin_s"] for run in runs.values())
    load.set_ylabel("arrivals/s")
    flight.set_ylabel("in flight")
    first.set_ylabel("TTFT, ms")
    gaps.set_ylabel("between tokens, ms")
    gaps.set_xlabel(f"seconds since the start (bins of {width:g} s)")
    for panel in (load, flight):
        panel.set_ylim(bottom=0)
    for panel in (load, flight, first, gaps):
        panel.set_xlim(left=0)
        _tidy(panel)
    notes = ["solid: median, dashed: 99th percentile of a bin"]
    if any(any(run["series"]["failed"]) for run in runs.values()):
        notes.append("×: failures/s")
    entries = [_Entry(_run_name(name, run), _colour(place)) for place, (name, run) in enumerate(runs.items())]
    _legend(figure, entries, notes=notes)
    return figure


def _course(panel: Axes, at: Sequence[float], values: Sequence[float | None], floor: float, **style: Any) -> None:
    """A curve with gaps where a bin has no samples; points, so that a lone bin shows too. Less than ``floor`` is drawn
    there."""
    heights = [float("nan") if value is None else max(value, floor) for value in values]
    panel.plot(at, heights, marker=".", markersize=3, **style)


def _scale_y(panel: Axes, samples: Sequence[Sequence[float | None]]) -> float:
    """Logarithmic where values span more than a factor of twenty, else from 0. Returns the bottom."""
    values = [value for own in samples for value in own if value]
    if not values or max(values) <= 20 * _low(values):
        panel.set_ylim(0, 1.08 * max(values, default=1.0))
        return 0.0
    bottom = _low(values) / 1.5
    panel.set_yscale("log")
    panel.set_ylim(bottom, max(values) * 1.5)
    panel.yaxis.set_major_formatter(_plain)
    return bottom


# --- against the rate


def _rate(sweeps: Mapping[str, Json]) -> Figure:
    figure = _figure(11, 4.8)
    done, first = figure.subplots(1, 2)
    highest = max(step["result"]["offered_rate"] for sweep in sweeps.values() for step in sweep["steps"])
    done.plot([0, highest], [0, highest], color="0.6", linewidth=1.0, linestyle=":", label="all that was sent")
    for place, (name, sweep) in enumerate(sweeps.items()):
        results = [step["result"] for step in sweep["steps"]]
        prefix = "" if len(sweeps) == 1 else f"{name}: "
        _against_rate(done, results, "request_throughput", f"{prefix}completed", place, dashed=True)
        if results[0]["request_goodput"] is not None:
            label = f"{prefix}goodput ({_targets(results[0])})"
            _against_rate(done, results, "request_goodput", label, place, dashed=False)
        _against_rate(first, results, "median_ttft_intended_ms", f"{prefix}median", place, dashed=False)
        _against_rate(first, results, "p99_ttft_intended_ms", f"{prefix}99th percentile", place, dashed=True)
        if sweep["saturating_rate"] is not None and sweep["saturation_seen"]:
            step = next(step for step in sweep["steps"] if step["rate"] == sweep["saturating_rate"])
            for panel in (done, first):
                panel.axvline(step["result"]["offered_rate"], color=_colour(place), linewidth=1.0, alpha=0.5)
    done.set_ylabel("requests/s")
    first.set_ylabel("TTFT from intended send, ms")
    _scale_y(
        first,
        [
            [step["result"][f"{key}_ttft_intended_ms"] for step in sweep["steps"]]
            for sweep in sweeps.values()
            for key in ("median", "p99")
        ],
    )
    done.set_ylim(bottom=0)
    for panel in (done, first):
        panel.set_xlabel("requests/s sent")
        panel.set_xlim(left=0)
        _tidy(panel)
        panel.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=9)
    notes = []
    if any(sweep["saturating_rate"] is not None and sweep["saturation_seen"] for sweep in sweeps.values()):
        notes.append("vertical line: the highest sustained rate")
    if any(not step["result"]["trustworthy"] for sweep in sweeps.values() for step in sweep["steps"]):
        notes.append("hollow: the generator was too slow to be trusted")
    if any("ttft" in step["result"]["few_samples"] for sweep in sweeps.values() for step in sweep["steps"]):
        notes.append(f"some rates have fewer than {FEW_SAMPLES} requests: their 99th percentile is the largest")
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=9, color="0.35")
    return figure


def _against_rate(panel: Axes, results: Sequence[Json], key: str, label: str, place: int, *, dashed: bool) -> None:
    """A figure of each rate; hollow where the generator was too slow to be trusted."""
    rates = [result["offered_rate"] for result in results]
    style: dict[str, Any] = {"color": _colour(place), "marker": _MARKERS[place % len(_MARKERS)], "markersize": 5}
    line: dict[str, Any] = (
        {"linestyle": (0, (4, 2)), "linewidth": 1.2} if dashed else {"linestyle": "-", "linewidth": 1.8}
    )
    panel.plot(rates, [result[key] for result in results], label=label, **style, **line)
    doubtful = [result for result in results if not result["trustworthy"]]
    panel.plot(
        [result["offered_rate"] for result in doubtful], [result[key] for result in doubtful], linestyle="none",
        markerfacecolor="white", **style,
    )  # fmt: skip


def _targets(result: Json) -> str:
    given = result["goodput_targets"] or {}
    return ", ".join(f"{name.removesuffix('_ms')} ≤ {value:g} ms" for name, value in given.items())


# --- what all of them share


class _Entry:
    """A line of a legend."""

    def __init__(self, label: str, colour: str) -> None:
        self.label = label
        self.colour = colour


def _run_name(name: str, run: Json) -> str:
    marks = (" *" if "ttft" in run["few_samples"] else "") + ("" if run["trustworthy"] else _DOUBTFUL)
    return f"{name}: {run['setup']['arrivals']}, {run['completed']} of {run['num_prompts']} completed{marks}"


def _legend(figure: Figure, entries: Sequence[_Entry], *, notes: Sequence[str]) -> None:
    """Above the panels, so it covers none of them."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=entry.colour, linewidth=2) for entry in entries]
    if any(entry.label.endswith(_DOUBTFUL) for entry in entries):
        notes = [*notes, "! the generator was too slow to be trusted"]
    if any("*" in entry.label for entry in entries):
        notes = [*notes, f"* fewer than {FEW_SAMPLES} requests"]
    figure.legend(handles, [entry.label for entry in entries], loc="outside upper left", frameon=False, fontsize=9,
                  ncols=1)  # fmt: skip
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=9, color="0.35")


def _tidy(panel: Axes) -> None:
    panel.grid(True, color="0.88", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]
