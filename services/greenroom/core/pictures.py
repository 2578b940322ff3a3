"""Pictures of figures: an empty one, and its file. matplotlib is an extra, and imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.core.errors import GreenroomError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")

# Colour-blind people can tell these apart too (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")


class PlotUnavailable(GreenroomError):
    """matplotlib is not installed, or the file can not be written."""


def check_drawing() -> None:
    """Raises PlotUnavailable without matplotlib. To be called before long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotUnavailable("matplotlib is not installed; plots are drawn with: pip install 'greenroom[plot]'") from (
            error
        )


def check_plot(path: Path) -> None:
    """Raises PlotUnavailable without matplotlib, or for a file of another kind. To be called before long work."""
    check_drawing()
    if path.suffix.lower() not in KINDS:
        raise PlotUnavailable(f"{path} can not be drawn: a plot's name ends in {', '.join(KINDS)}")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that needs no display. Raises PlotUnavailable without matplotlib."""
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG, SVG or PDF, as the file's name says. Raises PlotUnavailable where it can not be written."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotUnavailable(f"{path} can not be drawn: {error}") from error
