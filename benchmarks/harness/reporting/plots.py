"""What the pictures of all benchmarks have in common: their width, panels, curves with errors, scales, names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.core.pictures import COLOURS, PlotUnavailable, new_figure, save_figure

PAGE_WIDTH = 8.3
"""Inches of every picture. A page shows about 830 pixels: 100 an inch, at which 9 points can be read."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">")
_MAIN_COLOURS = (*COLOURS, "#000000")

Value = Mapping[str, float]
"""A figure with its errors: an interval, a spread, or a mean between ``low`` and ``high``."""


def style_of(place: int) -> dict[str, Any]:
    """Colour and marker of the arm at this place."""
    return {"color": _MAIN_COLOURS[place % len(_MAIN_COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def page(height: float) -> Any:
    """An empty figure as wide as a page; inches. Raises PlotUnavailable without matplotlib."""
    return new_figure(PAGE_WIDTH, height)


def panels_of(rows: int, columns: int, *, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A page and its panels, row by row; ``height``: inches of a row. Raises PlotUnavailable without matplotlib."""
    figure = page(height * rows)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel().tolist()


def pairs_of(count: int, *, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A page and so many panels, two in a row. Raises PlotUnavailable without matplotlib."""
    figure, panels = panels_of((count + 1) // 2, min(2, count), height=height)
    for panel in panels[count:]:
        panel.remove()
    return figure, panels[:count]


def save(figure: Any, path: Path) -> None:
    """Raises PlotUnavailable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def picture(draw: Callable[[], object], say: Callable[[str], object]) -> None:
    """Draw, or say why there is no picture. The figures are worth no less without it."""
    try:
        draw()
    except PlotUnavailable as error:
        say(f"no picture: {error}")


def centre(value: Value) -> float:
    return value["mean"] if "mean" in value else value["median"]


def errors(values: Sequence[Value]) -> list[list[float]]:
    """How far each reaches below its centre, and above."""
    below, above = [], []
    for value in values:
        middle = centre(value)
        low = value.get("low", value.get("min", middle - value.get("within", 0.0)))
        high = value.get("high", value.get("max", middle + value.get("within", 0.0)))
        below.append(middle - low)
        above.append(high - middle)
    return [below, above]


def scaled(values: Sequence[Value], scale: float) -> list[Value]:
    return [{name: scale * number for name, number in value.items()} for value in values]


def curve(panel: Any, places: Sequence[float], values: Sequence[Value], *, scale: float = 1.0, **style: Any) -> None:
    """Points with their errors, joined."""
    shown = scaled(values, scale)
    panel.errorbar(
        list(places), [centre(value) for value in shown], yerr=errors(shown),
        **{"capsize": 2, "markersize": 4, "linewidth": 1.5, **style},
    )  # fmt: skip


def band(panel: Any, places: Sequence[float], values: Sequence[Value], *, scale: float = 1.0, **style: Any) -> None:
    """A line through the centres, and a shade as far as the errors reach."""
    shown = scaled(values, scale)
    middle = [centre(value) for value in shown]
    below, above = errors(shown)
    (line,) = panel.plot(list(places), middle, **{"linewidth": 1.8, "marker": "o", "markersize": 3.5, **style})
    panel.fill_between(
        list(places), [at - by for at, by in zip(middle, below, strict=True)],
        [at + by for at, by in zip(middle, above, strict=True)], color=line.get_color(), alpha=0.15, linewidth=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LineEnd:
    """Where a line stops, and what it is called there."""

    name: str
    x: float
    y: float
    colour: str


def name_ends(panel: Any, ends: Sequence[LineEnd], *, apart: float = 0.075) -> None:
    """Each line's name to the right of the panel, as high as the line's end.

    Names are at least ``apart`` from each other, in shares of the panel's height. To be called when the axes have their
    scales and limits.
    """
    up = {end.name: float(_height_of(panel, end)) for end in ends}
    order = sorted(ends, key=lambda end: up[end.name])
    for end, at in zip(order, spread_out([up[end.name] for end in order], apart), strict=True):
        panel.annotate(
            end.name, xy=(end.x, end.y), xytext=(1.03, at), textcoords="axes fraction", color=end.colour, fontsize=9,
            verticalalignment="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2,
                        "relpos": (0.0, 0.5)},
        )  # fmt: skip


def _height_of(panel: Any, end: LineEnd) -> Any:
    return panel.transAxes.inverted().transform(panel.transData.transform((end.x, end.y)))[1]


def spread_out(places: Sequence[float], apart: float) -> list[float]:
    """Ascending places, moved until all are ``apart``. Those that crowd spread around their mean."""
    crowds: list[list[float]] = []
    for place in places:
        crowds.append([place])
        while len(crowds) > 1 and _lowest(crowds[-1], apart) - _highest(crowds[-2], apart) < apart:
            joined = crowds.pop()
            crowds[-1] += joined
    return [_lowest(crowd, apart) + number * apart for crowd in crowds for number in range(len(crowd))]


def _lowest(crowd: Sequence[float], apart: float) -> float:
    return sum(crowd) / len(crowd) - (len(crowd) - 1) / 2 * apart


def _highest(crowd: Sequence[float], apart: float) -> float:
    return sum(crowd) / len(crowd) + (len(crowd) - 1) / 2 * apart


def grouped_bars(panel: Any, groups: Sequence[str], arms: Mapping[str, Sequence[Value]], **style: Any) -> None:
    """A bar for each arm in every group, with its error. Arms beyond the colours are hatched."""
    width = 0.8 / max(1, len(arms))
    for place, (arm, values) in enumerate(arms.items()):
        at = [number + (place - (len(arms) - 1) / 2) * width for number in range(len(groups))]
        again = {} if place < len(_MAIN_COLOURS) else {"hatch": "/////", "edgecolor": "white", "linewidth": 0}
        panel.bar(
            at, [centre(value) for value in values], width, yerr=errors(values), label=arm, **again,
            **{"color": style_of(place)["color"], "ecolor": "0.45", "error_kw": {"linewidth": 0.9}, **style},
        )  # fmt: skip
    panel.set_xticks(range(len(groups)), list(groups))


def logarithmic(panel: Any, of: str = "y") -> None:
    """The scale of an axis, ``x`` or ``y``, with ticks as people write numbers."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    panel.set(**{f"{of}scale": "log"})
    axis = getattr(panel, f"{of}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(LogLocator(subs=()))


def tidy(panel: Any) -> None:
    panel.grid(True, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def legend_below(figure: Any, panels: Sequence[Any], columns: int = 4) -> None:
    """One legend for all panels, each name once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
