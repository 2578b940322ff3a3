"""A sweep as a picture: hit rate, and with a link the stall, against the share of experts resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.core.pictures import COLOURS, check_plot, new_figure, save_figure
from greenroom.replay.sweeps.report import at_once
from greenroom.replay.sweeps.sweep import BELADY, Cell, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In print, curves are told apart by their markers.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


def plot(sweep: Sweep, cells: Sequence[Cell], path: Path, *, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the file's name: a column for each concurrency, a curve for each policy.

    Raises PlotUnavailable without matplotlib, for another kind of file, or where the file can not be written.
    """
    check_plot(path)
    measures: list[tuple[str, Callable[[Cell], float]]] = [("hit rate, %", lambda cell: 100 * cell.cache.hit_rate)]
    if sweep.timed is not None:
        measures.append(("stall, ms a token", _stall))
    columns, rows = len(sweep.concurrency), len(measures)
    figure = new_figure(1.6 + 4.2 * columns, 1.2 + 3.3 * rows)
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
    save_figure(figure, path)


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
                "color": COLOURS[place % len(COLOURS)],
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
