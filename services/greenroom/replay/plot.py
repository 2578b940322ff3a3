"""A sweep as a picture: hit rate, and with a link the stall, against the share of experts resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.core.errors import GreenroomError
from greenroom.replay.report import at_once
from greenroom.replay.sweep import BELADY, Cell, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by colour-blind people too (Okabe and Ito's palette), and by the marker in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

KINDS = (".png", ".svg", ".pdf")


class PlotUnavailable(GreenroomError):
    """There is nothing to draw with, or the file can not be written."""


def check_plot(path: Path) -> None:
    """Raises PlotUnavailable without matplotlib, or for a file of another kind: worth knowing before the long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotUnavailable("matplotlib is not installed; plots are drawn with: pip install 'greenroom[plot]'") from (
            error
        )
    if path.suffix.lower() not in KINDS:
        raise PlotUnavailable(f"{path} can not be drawn: a plot's name ends in {', '.join(KINDS)}")


def plot(sweep: Sweep, cells: Sequence[Cell], path: Path, *, title: str) -> None:
    """Writes a PNG, SVG or PDF, as the file's name says: a column for each concurrency, a curve for each policy.

    Raises PlotUnavailable without matplotlib, for another kind of file, or where it can not be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measures: list[tuple[str, Callable[[Cell], float]]] = [("hit rate, %", lambda cell: 100 * cell.cache.hit_rate)]
    if sweep.timed is not None:
        measures.append(("stall, ms a token", _stall))
    columns, rows = len(sweep.concurrency), len(measures)
    figure = Figure(figsize=(1.6 + 4.2 * columns, 1.2 + 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row")
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    experts = sweep.trace.catalogue().size
    for row, (label, measure) in enumerate(measures):
        for column, concurrent in enumerate(sweep.concurrency):
            own = [cell for cell in cells if cell.concurrent == concurrent]
            _panel(axes[row, column], own, policies, experts, measure)
            if row == 0:
                axes[row, column].set_title(at_once(concurrent), fontsize=11)
                axes[row, column].set_ylim(0, 100)
            else:
                axes[row, column].set_ylim(bottom=0)
            if row == rows - 1:
                axes[row, column].set_xlabel(f"experts resident, % of {experts}")
        axes[row, 0].set_ylabel(label)
    figure.suptitle(title, fontsize=12, x=0.02, horizontalalignment="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotUnavailable(f"{path} can not be drawn: {error}") from error


def _panel(
    axes: Axes, cells: Sequence[Cell], policies: Sequence[str], experts: int, measure: Callable[[Cell], float]
) -> None:
    others = [policy for policy in policies if policy != BELADY]
    for policy in policies:
        own = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.slots)
        style: dict[str, Any]
        if policy == BELADY:
            style = {"color": "black", "linestyle": "--", "marker": ".", "label": "Belady (knows the future)"}
        else:
            place = others.index(policy)
            style = {
                "color": _COLOURS[place % len(_COLOURS)],
                "marker": _MARKERS[place % len(_MARKERS)],
                "markersize": 5,
                "label": policy,
            }
        axes.plot(
            [100 * cell.slots / experts for cell in own],
            [measure(cell) for cell in own],
            linewidth=1.6,
            clip_on=False,
            **style,
        )
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _stall(cell: Cell) -> float:
    timed = cell.timed
    return float("nan") if timed is None or not timed.tokens else 1e3 * timed.stall_seconds / timed.tokens
