"""Crops of one component each, as a camera over the board takes them. Seeded: the same arguments draw the same crop."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from greenroom.demo.board.canvas import Canvas, Frame, Image
from greenroom.demo.board.component_types import GOOD, MISSING, ORIENTATIONS, RIGHT, SHIFTED, ComponentType
from greenroom.demo.board.surroundings import Rng, Style, bare_board, lit, random_style, to_bytes

PIXELS: Final = 64
"""A crop is square."""
_UNIT: Final = 26.0
"""Pixels of half a large part."""
_COMMON: Final = (MISSING, SHIFTED)

Split = Literal["train", "heldout", "samples"]
Crop = NDArray[np.uint8]
"""``[64, 64, 3]``, red, green and blue."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a crop is to show: the type, one of its labels, and how it lies."""

    type: ComponentType
    label: str
    orientation: str = RIGHT


def crop(wanted: Wanted, seed: int, split: Split, index: int) -> Crop:
    rng = rng_for(wanted.type, wanted.label, seed, split, index, wanted.orientation)
    image: Image = np.empty((PIXELS, PIXELS, 3), np.float32)
    style = random_style(rng)
    bare_board(image, style, rng, 2 * _UNIT * 1.2)
    place = Frame(PIXELS / 2 + rng.uniform(-1.5, 1.5), PIXELS / 2 + rng.uniform(-1.5, 1.5), _UNIT, rng.uniform(-3, 3))
    draw_part(image, place.scaled(rng.uniform(0.86, 1.02)), wanted, style, rng)
    return to_bytes(lit(image, rng))


def draw_part(image: Image, place: Frame, wanted: Wanted, style: Style, rng: Rng) -> None:
    """Pads and print at ``place``, and the part where it came to lie."""
    canvas = Canvas(image, place)
    wanted.type.drawing.footprint(canvas, style, rng)
    if wanted.label == MISSING:
        return
    degrees = rng.choice(ORIENTATIONS[wanted.orientation])
    if wanted.label == SHIFTED:
        frame = _misplaced(place, rng)
    else:
        frame = place.moved(*rng.uniform(-0.04, 0.04, 2)).turned(rng.uniform(-2.5, 2.5))
    defect = wanted.label if wanted.label in wanted.type.labels[1:] and wanted.label not in _COMMON else None
    wanted.type.drawing.body(canvas.on(frame.turned(degrees)), style, rng, defect)


def _misplaced(place: Frame, rng: Rng) -> Frame:
    """Far enough off, or turned far enough, that it can be seen."""
    if rng.random() < 0.5:
        angle, far = rng.uniform(0, 2 * np.pi), rng.uniform(0.26, 0.46)
        return place.moved(far * np.cos(angle), far * np.sin(angle)).turned(rng.uniform(-6, 6))
    turn = rng.choice([-1, 1]) * rng.uniform(16, 34)
    return place.moved(*rng.uniform(-0.10, 0.10, 2)).turned(turn)


def any_orientation(type_: ComponentType, rng: Rng) -> str:
    """How a part comes to lie: seven of ten as they should. Of a type without polarity nobody could tell."""
    if type_.orientation is None:
        return RIGHT
    return str(rng.choice(list(ORIENTATIONS), p=(0.7, 0.15, 0.15)))


def of_label(type_: ComponentType, label: str, many: int, seed: int, split: Split) -> Iterator[Crop]:
    """Crops of this type and label, lying in any orientation."""
    for index in range(many):
        orientation = any_orientation(type_, rng_for(type_, label, seed, split, index))
        yield crop(Wanted(type_, label, orientation), seed, split, index)


def of_orientation(
    types: Sequence[ComponentType], orientation: str, many: int, seed: int, split: Split
) -> Iterator[Crop]:
    """Good parts of these types in turn, lying so."""
    for index in range(many):
        yield crop(Wanted(types[index % len(types)], GOOD, orientation), seed, split, index)


def rng_for(type_: ComponentType, label: str, seed: int, split: Split, index: int, what: str = "wanted") -> Rng:
    """For each of its arguments another one; ``what``: what is drawn with it."""
    names = f"{type_.name}/{label}/{split}/{what}"
    return np.random.default_rng([seed, index, zlib.crc32(names.encode())])
