"""What lies around a part: the board's solder mask, traces, pads and print, and the light and noise of a camera."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin
from typing import Final

import numpy as np

from greenroom.demo.board.canvas import Canvas, Colour, Field, Frame, Image
from greenroom.demo.board.lettering import bitmap, random_text

Rng = np.random.Generator

_MASKS: Final[tuple[tuple[float, Colour], ...]] = (
    (0.64, (0.06, 0.34, 0.17)),
    (0.14, (0.07, 0.19, 0.40)),
    (0.12, (0.10, 0.11, 0.12)),
    (0.10, (0.42, 0.09, 0.10)),
)
"""Solder masks and how often they come: green, blue, black, red."""
_METALS: Final[tuple[Colour, ...]] = ((0.74, 0.74, 0.72), (0.80, 0.66, 0.33))
"""Tin and gold."""


@dataclass(frozen=True, slots=True)
class Style:
    """What is alike all over one board. ``light``: degrees from which it comes; shadows fall the other way."""

    mask: Colour
    copper: Colour
    silk: Colour
    metal: Colour
    light: float


def jittered(rng: Rng, colour: Colour, amount: float) -> Colour:
    """Each channel and all three together a little off."""
    together = rng.uniform(-amount, amount)
    red, green, blue = (float(np.clip(one + together + rng.uniform(-amount, amount) / 2, 0, 1)) for one in colour)
    return red, green, blue


def random_style(rng: Rng, mask: Colour | None = None) -> Style:
    """``mask``: the solder mask, any of the usual ones where it is left out."""
    if mask is None:
        mask = _MASKS[rng.choice(len(_MASKS), p=[share for share, _ in _MASKS])][1]
    mask = jittered(rng, mask, 0.04)
    lift = rng.uniform(0.05, 0.10)
    return Style(
        mask=mask,
        copper=(mask[0] + lift, mask[1] + lift * 1.4, mask[2] + lift * 0.7),
        silk=jittered(rng, (0.86, 0.87, 0.84), 0.05),
        metal=jittered(rng, _METALS[rng.integers(len(_METALS))], 0.04),
        light=rng.uniform(0, 360),
    )


def bare_board(image: Image, style: Style, rng: Rng, cell: float) -> None:
    """Fills the image with mask, traces and vias. ``cell``: pixels of a part's square, by which they are sized."""
    height, width = image.shape[:2]
    image[:] = style.mask
    canvas = Canvas(image, Frame(0, 0, cell))
    for _ in range(max(3, round(3.5 * height * width / cell**2))):
        x, y = rng.uniform(0, width / cell), rng.uniform(0, height / cell)
        _trace(canvas, style, rng, x, y)
    canvas.image += _mottled(height, width, rng)[..., None] * np.float32(0.012)


def _trace(board: Canvas, style: Style, rng: Rng, x: float, y: float) -> None:
    """One to three parallel traces with a bend of 45 degrees, and sometimes a via at the end."""
    angle = rng.integers(8) * pi / 4
    bend = angle + rng.choice([-pi / 4, pi / 4])
    first, second = rng.uniform(0.2, 0.6), rng.uniform(0.2, 0.7)
    width, many, with_via = rng.uniform(0.02, 0.045), int(rng.integers(1, 4)), rng.random() < 0.6
    canvas = board.around(x, y, first + second + 0.3)
    if canvas is None:
        return
    lines, end = [], (x, y)
    for place in reversed(range(many)):
        off = place * width * 2.2
        start = (x - sin(angle) * off, y + cos(angle) * off)
        middle = (start[0] + cos(angle) * first, start[1] + sin(angle) * first)
        end = (middle[0] + cos(bend) * second, middle[1] + sin(bend) * second)
        lines.append(canvas.path([start, middle, end], width))
    canvas.paint(np.minimum.reduce(lines), style.copper)
    via = canvas.around(*end, 0.1)
    if with_via and via is not None:
        via.paint(via.disc(*end, 0.045), style.metal, 0.8)
        via.paint(via.disc(*end, 0.02), (0.05, 0.06, 0.05))


def _mottled(height: int, width: int, rng: Rng) -> Field:
    """Noise that is smooth over some pixels, about a normal deviation of 1."""
    down, across = _between(height), _between(width)
    found: Field = down @ rng.standard_normal((down.shape[1], across.shape[1])).astype(np.float32) @ across.T
    return found


def _between(pixels: int) -> Field:
    """``[pixels, nodes]``: how much of each node there is at each pixel, with a node every five pixels."""
    nodes = np.arange(pixels // 5 + 2, dtype=np.float32)
    places = np.arange(pixels, dtype=np.float32)[:, None] / 5
    found: Field = np.maximum(0, 1 - np.abs(places - nodes)).astype(np.float32)
    return found


def pads(canvas: Canvas, style: Style, shape: Field) -> None:
    """Metal pads with a seam of bare board around them, and solder that shines in the middle."""
    canvas.lighten(shape - 0.03, -0.25)
    canvas.paint(shape, style.metal)
    canvas.lighten(shape + 0.07, 0.22, blur=0.08)


def print_outline(canvas: Canvas, style: Style, shape: Field) -> None:
    """Silk-screen print along the edge of ``shape``."""
    outline: Field = np.abs(shape) - np.float32(0.018)
    canvas.paint(outline, style.silk, 0.85)


def print_name(canvas: Canvas, style: Style, rng: Rng, prefix: str, y: float) -> None:
    """A designator such as R47, at this height; often none fits."""
    if rng.random() < 0.6:
        text = bitmap(random_text(rng, prefix + "9" * int(rng.integers(1, 3))))
        canvas.stamp(text, rng.uniform(-0.5, 0.5), y, 0.042, style.silk, 0.85)


def shadow(canvas: Canvas, style: Style, shape_of: Field, depth: float = 0.07) -> None:
    """Under a part of this outline: darker all around, and more on the side away from the light."""
    turn = (style.light - canvas.frame.degrees) * pi / 180
    across, down = -cos(turn) * depth * canvas.frame.pixels, -sin(turn) * depth * canvas.frame.pixels
    away = np.roll(shape_of, (round(down), round(across)), (0, 1))
    canvas.lighten(np.minimum(away, shape_of - 0.02), -0.38, blur=0.06)


def lit(image: Image, rng: Rng, noise: float = 1.0) -> Image:
    """Under a lamp and a camera: brightness, a gradient, a tint, a little out of focus, noise times ``noise``."""
    height, width = image.shape[:2]
    turn, slope = rng.uniform(0, 2 * pi), rng.uniform(0, 0.14)
    down, right = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    ramp = rng.uniform(0.82, 1.18) + slope * (cos(turn) * right + sin(turn) * down)
    tint = 1 + rng.uniform(-0.04, 0.04, 3)
    found = image * ramp[..., None].astype(np.float32) * tint.astype(np.float32)
    soft = rng.uniform(0, 0.22)
    for _ in range(2):  # down, then across
        wider = np.pad(found, ((1, 1), (0, 0), (0, 0)), mode="edge")
        found = (found * (1 - 2 * soft) + soft * (wider[:-2] + wider[2:])).swapaxes(0, 1)
    grain = rng.standard_normal(found.shape).astype(np.float32) * np.float32(rng.uniform(0.006, 0.028) * noise)
    seen: Image = np.clip(found + grain, 0, 1).astype(np.float32)
    return seen


def to_bytes(image: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """``[height, width, 3]`` uint8."""
    return np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
