"""What a drawing of a component is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from greenroom.demo.board.canvas import Canvas, Colour, Field
from greenroom.demo.board.surroundings import Rng, Style

BLACK: Final[Colour] = (0.10, 0.10, 0.11)
SILVER: Final[Colour] = (0.76, 0.77, 0.78)
COPPER: Final[Colour] = (0.70, 0.42, 0.22)
GOLD: Final[Colour] = (0.83, 0.69, 0.34)
PRINT: Final[Colour] = (0.82, 0.82, 0.80)

Footprint = Callable[[Canvas, Style, Rng], None]
Body = Callable[[Canvas, Style, Rng, str | None], None]


@dataclass(frozen=True, slots=True)
class Drawing:
    """``footprint`` draws what the board has for the part, ``body`` the part, with the defect that the last argument
    names, if it does. Units: the square of one part is from -1.2 to 1.2 both ways; polar parts have their mark left or
    above.
    """

    footprint: Footprint
    body: Body


def crack(
    canvas: Canvas,
    rng: Rng,
    half_width: float,
    half_height: float,
    inside: Field,
    colour: Colour,
    width: float = 1.0,
) -> None:
    """A jagged line from the upper to the lower edge of a body, where ``inside`` is below 0. Its edges shine."""
    middle = rng.uniform(-0.45, 0.45) * half_width
    heights = np.linspace(-half_height, half_height, 6)
    points = [(middle + float(rng.uniform(-0.16, 0.16)), float(height)) for height in heights]
    line = canvas.path(points, width * float(rng.uniform(0.07, 0.11)))
    canvas.lighten(np.maximum(line - 0.04 * width, inside), 0.20 + 0.3 * (width - 1))
    canvas.paint(np.maximum(line, inside), colour)


def stain(canvas: Canvas, rng: Rng, x: float, y: float, radius: float, colour: Colour, opacity: float = 0.9) -> None:
    """Soot or a leak: overlapping blots with soft edges."""
    for _ in range(5):
        off_x, off_y = rng.uniform(-0.5, 0.5, 2) * radius
        canvas.paint(
            canvas.disc(x + off_x, y + off_y, radius * rng.uniform(0.35, 0.75)), colour, opacity, blur=radius * 0.5
        )


def solder_ball(canvas: Canvas, x: float, y: float, half_width: float, half_height: float) -> None:
    """Solder where none should be, such as between two leads."""
    shape = canvas.box(x, y, half_width, half_height, min(half_width, half_height))
    canvas.lighten(shape - 0.02, -0.35)
    canvas.paint(shape, canvas.shade((0.82, 0.83, 0.85), x, y, max(half_width, half_height), 0.25))
    canvas.lighten(canvas.disc(x - half_width * 0.3, y - half_height * 0.3, 0.035), 0.8, blur=0.04)
