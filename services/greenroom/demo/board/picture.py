"""A picture of a whole board, with the order in which a camera takes its crops and what it should find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.demo.board.canvas import Canvas, Colour, Frame, Image
from greenroom.demo.board.component_types import GOOD, RIGHT, ComponentType
from greenroom.demo.board.crops import Wanted, draw_part
from greenroom.demo.board.surroundings import Rng, bare_board, lit, random_style, to_bytes

COLUMNS: Final = 12
ROWS: Final = 8
CELL: Final = 72
"""Pixels of the square that a part has."""
_GAP: Final = 14
_MARGIN: Final = 26
_DEFECTS: Final = 9
_PATH: Final[Colour] = (0.95, 0.95, 0.60)
_DEFECT: Final[Colour] = (1.00, 0.18, 0.15)
_GREEN: Final[Colour] = (0.05, 0.33, 0.17)


def board_picture(types: Sequence[ComponentType], seed: int) -> NDArray[np.uint8]:
    """``[height, width, 3]``. Red frames mark parts that should be found faulty; the line is the order of the crops."""
    rng = np.random.default_rng([seed, 20])
    pitch = CELL + _GAP
    height, width = 2 * _MARGIN + ROWS * pitch - _GAP, 2 * _MARGIN + COLUMNS * pitch - _GAP
    image: Image = np.empty((height, width, 3), np.float32)
    style = random_style(rng, _GREEN)
    bare_board(image, style, rng, CELL)
    parts = list(_parts(types, rng))
    for (row, column), wanted in zip(scan_order(), parts, strict=True):
        top, left = _MARGIN + row * pitch, _MARGIN + column * pitch
        view = image[top : top + CELL, left : left + CELL]
        draw_part(view, Frame(CELL / 2, CELL / 2, CELL / 2.5), wanted, style, rng)
    image = lit(image, rng, noise=0)
    canvas = Canvas(image, Frame(0, 0, 1))
    middles = [(_MARGIN + column * pitch + CELL / 2, _MARGIN + row * pitch + CELL / 2) for row, column in scan_order()]
    _draw_path(canvas, middles)
    for (x, y), wanted in zip(middles, parts, strict=True):
        if wanted.label != GOOD or wanted.orientation != RIGHT:
            near = canvas.around(x, y, CELL / 2 + 6)
            if near is not None:
                near.paint(abs(near.box(x, y, CELL / 2 + 1, CELL / 2 + 1, 5)) - 1.2, _DEFECT)
    return to_bytes(image)


def scan_order() -> Iterator[tuple[int, int]]:
    """Row and column of each part: rows to and fro, as a camera travels least."""
    for row in range(ROWS):
        columns = range(COLUMNS) if row % 2 == 0 else reversed(range(COLUMNS))
        yield from ((row, column) for column in columns)


def _parts(types: Sequence[ComponentType], rng: Rng) -> Iterator[Wanted]:
    """Every type at least twice, the small ones more often, in runs as on boards; a few with a defect, or turned."""
    cells = ROWS * COLUMNS
    shares = np.sqrt([sum(one.values.values()) for one in types])
    many = np.maximum(1, np.floor(shares / shares.sum() * cells)).astype(int)
    runs = [(place, 2) for place, count in enumerate(many) for _ in range(-(-count // 2))]
    order = [runs[place] for place in rng.permutation(len(runs))]
    chosen = [place for place, length in order for _ in range(length)]
    chosen = (chosen * (cells // len(chosen) + 1))[:cells]
    spoilt = set(rng.choice(cells, _DEFECTS, replace=False).tolist())
    for cell, place in enumerate(chosen):
        type_ = types[place]
        if cell not in spoilt:
            yield Wanted(type_, GOOD)
        elif type_.orientation is not None and rng.random() < 0.5:
            yield Wanted(type_, GOOD, str(rng.choice(["turned", "reversed"])))
        else:
            yield Wanted(type_, str(rng.choice(type_.labels[1:])))


def _draw_path(canvas: Canvas, middles: Sequence[tuple[float, float]]) -> None:
    """Between the parts only, so that it hides none."""
    for (x, y), (next_x, next_y) in pairwise(middles):
        near = canvas.around((x + next_x) / 2, (y + next_y) / 2, _GAP)
        if near is not None:
            share = (_GAP / 2 - 1) / max(abs(next_x - x), abs(next_y - y))
            middle_x, middle_y, dx, dy = (x + next_x) / 2, (y + next_y) / 2, next_x - x, next_y - y
            start = (middle_x - dx * share, middle_y - dy * share)
            end = (middle_x + dx * share, middle_y + dy * share)
            near.paint(near.line(start, end, 2.0), _PATH, 0.9)
