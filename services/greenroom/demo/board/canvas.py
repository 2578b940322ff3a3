"""Shapes with smooth edges, painted onto an image in numpy.

Shapes are distance fields: of each pixel, how far it is outside (above 0) or inside (below 0) the shape, in units. A
part has its own frame, in which it is drawn upright; the frame says how it is shifted, turned and scaled on the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import cos, pi, sin

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]
"""``[height, width, 3]``, red, green and blue from 0 to 1."""
Field = NDArray[np.float32]
"""``[height, width]``."""
Colour = tuple[float, float, float]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where units lie on an image: the pixel of their origin, pixels a unit, and degrees turned clockwise."""

    x: float
    y: float
    pixels: float
    degrees: float = 0.0

    def moved(self, right: float, down: float) -> Frame:
        """Shifted by units of this frame."""
        turn = self.degrees * pi / 180
        dx, dy = right * cos(turn) - down * sin(turn), right * sin(turn) + down * cos(turn)
        return replace(self, x=self.x + dx * self.pixels, y=self.y + dy * self.pixels)

    def turned(self, degrees: float) -> Frame:
        return replace(self, degrees=self.degrees + degrees)

    def scaled(self, factor: float) -> Frame:
        return replace(self, pixels=self.pixels * factor)


class Canvas:
    """An image and the frame that shapes are given in. Painting changes the image in place."""

    def __init__(self, image: Image, frame: Frame) -> None:
        height, width = image.shape[:2]
        down, right = np.mgrid[0:height, 0:width].astype(np.float32)
        turn = frame.degrees * pi / 180
        dx, dy = (right + 0.5 - frame.x) / frame.pixels, (down + 0.5 - frame.y) / frame.pixels
        self.image = image
        self.frame = frame
        self.u: Field = (dx * np.float32(cos(turn)) + dy * np.float32(sin(turn))).astype(np.float32)
        self.v: Field = (dy * np.float32(cos(turn)) - dx * np.float32(sin(turn))).astype(np.float32)

    def on(self, frame: Frame) -> Canvas:
        """The same image in another frame."""
        return Canvas(self.image, frame)

    def around(self, x: float, y: float, reach: float) -> Canvas | None:
        """The part of the image that is at most ``reach`` away from (x, y), so that small shapes cost little."""
        frame = self.frame.moved(x, y)
        left, top = max(0, int(frame.x - reach * frame.pixels)), max(0, int(frame.y - reach * frame.pixels))
        right, low = int(frame.x + reach * frame.pixels) + 1, int(frame.y + reach * frame.pixels) + 1
        image = self.image[top : max(top, low), left : max(left, right)]
        return Canvas(image, replace(self.frame, x=self.frame.x - left, y=self.frame.y - top)) if image.size else None

    def paint(self, shape: Field, colour: Colour | Image, opacity: float = 1.0, blur: float = 0.0) -> None:
        """``blur``: over how many units the edge fades, beyond the one pixel that keeps it smooth."""
        fade = 1 / self.frame.pixels + blur
        touched = shape < fade / 2
        rows, columns = np.flatnonzero(touched.any(axis=1)), np.flatnonzero(touched.any(axis=0))
        if not rows.size:
            return
        window = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        cover = np.clip(0.5 - shape[window] / np.float32(fade), 0, 1)[..., None] * np.float32(opacity)
        paint = np.asarray(colour, np.float32)
        under = self.image[window]
        under += cover * ((paint if paint.ndim == 1 else paint[window]) - under)

    def lighten(self, shape: Field, amount: float, blur: float = 0.0) -> None:
        """Towards white, or towards black where ``amount`` is below 0."""
        self.paint(shape, (1.0, 1.0, 1.0) if amount > 0 else (0.0, 0.0, 0.0), abs(amount), blur)

    def box(self, x: float, y: float, half_width: float, half_height: float, corner: float = 0.0) -> Field:
        """Around (x, y). ``corner``: the radius of its corners."""
        a = np.abs(self.u - x) - (half_width - corner)
        b = np.abs(self.v - y) - (half_height - corner)
        outside = np.hypot(np.maximum(a, 0), np.maximum(b, 0))
        found: Field = (outside + np.minimum(np.maximum(a, b), 0) - corner).astype(np.float32)
        return found

    def disc(self, x: float, y: float, radius: float) -> Field:
        found: Field = (np.hypot(self.u - x, self.v - y) - radius).astype(np.float32)
        return found

    def ring(self, x: float, y: float, radius: float, width: float) -> Field:
        found: Field = (np.abs(np.hypot(self.u - x, self.v - y) - radius) - width / 2).astype(np.float32)
        return found

    def line(self, start: Point, end: Point, width: float) -> Field:
        """With round ends."""
        dx, dy = end[0] - start[0], end[1] - start[1]
        along = ((self.u - start[0]) * dx + (self.v - start[1]) * dy) / max(dx * dx + dy * dy, 1e-9)
        along = np.clip(along, 0, 1)
        across = np.hypot(self.u - start[0] - along * dx, self.v - start[1] - along * dy)
        found: Field = (across - width / 2).astype(np.float32)
        return found

    def path(self, points: Sequence[Point], width: float) -> Field:
        """Lines from point to point."""
        lines = [self.line(start, end, width) for start, end in pairwise(points)]
        found: Field = np.minimum.reduce(lines)
        return found

    def comb(self, x: float, y: float, half_width: float, half_height: float, pitch: float, count: int) -> Field:
        """``count`` boxes side by side, the whole row around (x, y)."""
        first = x - pitch * (count - 1) / 2
        nearest = np.clip(np.round((self.u - first) / pitch), 0, count - 1)
        a, b = np.abs(self.u - first - nearest * pitch) - half_width, np.abs(self.v - y) - half_height
        found: Field = np.maximum(a, b).astype(np.float32)
        return found

    def convex(self, points: Sequence[Point]) -> Field:
        """A convex polygon, its corners given clockwise as one sees them."""
        found = np.full(self.u.shape, -np.inf, np.float32)
        for (x, y), (next_x, next_y) in zip(points, [*points[1:], points[0]], strict=True):
            dx, dy = next_x - x, next_y - y
            away = ((self.u - x) * dy - (self.v - y) * dx) / max(float(np.hypot(dx, dy)), 1e-9)
            found = np.maximum(found, away.astype(np.float32))
        return found

    def stamp(self, bitmap: Field, x: float, y: float, cell: float, colour: Colour, opacity: float = 1.0) -> None:
        """Paints ``bitmap``, ``[rows, columns]`` from 0 to 1 with cells of this size, around (x, y)."""
        padded = np.pad(bitmap, 2)
        rows, columns = padded.shape
        across = np.clip((self.u - x) / cell + columns / 2 - 0.5, 0, columns - 1.001)
        down = np.clip((self.v - y) / cell + rows / 2 - 0.5, 0, rows - 1.001)
        left, top = across.astype(np.int32), down.astype(np.int32)
        right_share, low_share = across - left, down - top
        upper = padded[top, left] * (1 - right_share) + padded[top, left + 1] * right_share
        lower = padded[top + 1, left] * (1 - right_share) + padded[top + 1, left + 1] * right_share
        cover = (upper * (1 - low_share) + lower * low_share)[..., None] * np.float32(opacity)
        self.image += (cover * (np.asarray(colour, np.float32) - self.image)).astype(np.float32)

    def shade(self, base: Colour, x: float, y: float, radius: float, strength: float) -> Image:
        """A colour for ``paint`` that is lighter up and left of (x, y), as a round body is."""
        slope = np.clip((x - self.u + y - self.v) / (2 * radius), -1, 1)[..., None] * np.float32(strength)
        found: Image = np.clip(np.asarray(base, np.float32) + slope, 0, 1).astype(np.float32)
        return found


def union(*shapes: Field) -> Field:
    found: Field = np.minimum.reduce(shapes)
    return found


def intersection(*shapes: Field) -> Field:
    found: Field = np.maximum.reduce(shapes)
    return found


def without(shape: Field, *others: Field) -> Field:
    found: Field = np.maximum.reduce([shape, *(-other for other in others)])
    return found
