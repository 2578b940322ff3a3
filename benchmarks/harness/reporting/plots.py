"""What the pictures of all benchmarks have in common: panels, curves with their errors, scales, legends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from greenroom.core.pictures import COLOURS, PlotUnavailable, new_figure, save_figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">")
_MAIN_COLOURS = (*COLOURS, "#000000")

Value = Mapping[str, float]
"""A figure with its errors: an interval, a spread, or a mean between ``low`` and ``high``."""


def style_of(place: int) -> dict[str, Any]:
    """Colour and marker of the arm at this place."""
    return {"color": _MAIN_COLOURS[place % len(_MAIN_COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def panels_of(rows: int, columns: int, *, width: float = 4.8, height: float = 4.4) -> tuple[Any, list[Any]]:
    """An empty figure and its panels, row by row; inches of one panel. Raises PlotUnavailable without matplotlib."""
    figure = new_figure(width * columns, height * rows)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel().tolist()


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


def grouped_bars(panel: Any, groups: Sequence[str], arms: Mapping[str, Sequence[Value]], **style: Any) -> None:
    """A bar for each arm in every group, with its error."""
    width = 0.8 / max(1, len(arms))
    for place, (arm, values) in enumerate(arms.items()):
        at = [number + (place - (len(arms) - 1) / 2) * width for number in range(len(groups))]
        panel.bar(
            at, [centre(value) for value in values], width, yerr=errors(values), label=arm,
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
