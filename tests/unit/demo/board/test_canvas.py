"""Shapes lie where they should, in whatever frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.demo.board.canvas import Canvas, Frame, Image, union, without
from greenroom.demo.board.lettering import bitmap

_WHITE = (1.0, 1.0, 1.0)


def _black(size: int = 40) -> Image:
    return np.zeros((size, size, 3), np.float32)


def _middle(image: Image) -> tuple[float, float]:
    """Of what is painted: right and down from the upper left corner, in pixels."""
    shares = image[..., 0] / image[..., 0].sum()
    places = np.arange(len(image)) + 0.5
    return float((shares.sum(0) * places).sum()), float((shares.sum(1) * places).sum())


def _painted(frame: Frame, shape: str, *arguments: Any) -> Image:
    canvas = Canvas(_black(), frame)
    canvas.paint(getattr(canvas, shape)(*arguments), _WHITE)
    return canvas.image


@pytest.mark.parametrize(
    ("shape", "arguments", "area"),
    [
        ("box", (0, 0, 0.6, 0.4), 1.2 * 0.8),
        ("box", (0, 0, 0.6, 0.6, 0.6), np.pi * 0.36),
        ("disc", (0, 0, 0.5), np.pi * 0.25),
        ("ring", (0, 0, 0.5, 0.2), np.pi * (0.36 - 0.16)),
        ("line", ((-0.5, 0), (0.5, 0), 0.2), 0.2 + np.pi * 0.01),
        ("convex", ([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5)],), 0.5),
        ("comb", (0, 0, 0.1, 0.4, 0.5, 3), 3 * 0.2 * 0.8),
    ],
)
@pytest.mark.parametrize("degrees", [0.0, 30.0, 90.0])
def test_a_shape_covers_its_area_however_it_is_turned(
    shape: str, arguments: tuple[Any, ...], area: float, degrees: float
) -> None:
    image = _painted(Frame(20, 20, 16, degrees), shape, *arguments)
    assert image[..., 0].sum() / 16**2 == pytest.approx(area, rel=0.05)


@pytest.mark.parametrize(("degrees", "middle"), [(0, (28, 20)), (90, (20, 28)), (180, (12, 20)), (270, (20, 12))])
def test_frames_turn_clockwise(degrees: float, middle: tuple[float, float]) -> None:
    image = _painted(Frame(20, 20, 16).turned(degrees), "disc", 0.5, 0, 0.2)
    assert _middle(image) == pytest.approx(middle, abs=0.1)
    moved = Frame(20, 20, 16, degrees).moved(0.5, 0)
    assert (moved.x, moved.y) == pytest.approx(middle)


def test_painting_a_part_of_the_image_is_painting_it_all() -> None:
    frame = Frame(22, 18, 16, 25)
    whole = _painted(frame, "disc", 0.3, -0.2, 0.25)
    canvas = Canvas(_black(), frame)
    near = canvas.around(0.3, -0.2, 0.5)
    assert near is not None
    near.paint(near.disc(0.3, -0.2, 0.25), _WHITE)
    assert near.image.shape[0] < 20
    np.testing.assert_allclose(canvas.image, whole, atol=1e-5)
    assert canvas.around(9, 9, 0.5) is None


def test_sets_of_shapes() -> None:
    canvas = Canvas(_black(), Frame(20, 20, 16))
    left, right = canvas.box(-0.3, 0, 0.2, 0.2), canvas.box(0.3, 0, 0.2, 0.2)
    canvas.paint(without(union(left, right), right), _WHITE)
    assert canvas.image[20, 15, 0] == 1
    assert canvas.image[20, 25, 0] == 0


def test_letters_are_read_from_left_to_right() -> None:
    canvas = Canvas(_black(), Frame(20, 20, 16))
    canvas.stamp(bitmap("L7"), 0, 0, 0.125, _WHITE)
    left, right = canvas.image[:, :20, 0], canvas.image[:, 20:, 0]
    assert left[22:].sum() > left[:18].sum()  # an L is heavy below
    assert right[:18].sum() > right[22:].sum()  # a 7 above
    assert set(np.unique(bitmap("0AQ9"))) == {0, 1}
