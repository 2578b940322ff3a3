"""Drawing: seeded, and what is drawn shows what it is to show."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import combinations, pairwise

import numpy as np
import pytest

from greenroom.demo.board.canvas import Frame, Image
from greenroom.demo.board.component_types import GOOD, MISSING, ORIENTATIONS, RIGHT, SHIFTED, TYPES, ComponentType
from greenroom.demo.board.crops import PIXELS, Wanted, crop, draw_part
from greenroom.demo.board.expert_crops import experts_of
from greenroom.demo.board.picture import COLUMNS, ROWS, board_picture, scan_order
from greenroom.demo.board.surroundings import random_style

_NAMED = pytest.mark.parametrize("type_", TYPES, ids=[one.name for one in TYPES])


@_NAMED
def test_the_same_arguments_draw_the_same_and_others_do_not(type_: ComponentType) -> None:
    for label in type_.labels:
        wanted = Wanted(type_, label)
        first = crop(wanted, 5, "train", 7)
        assert first.shape == (PIXELS, PIXELS, 3)
        assert first.dtype == np.uint8
        assert np.array_equal(first, crop(wanted, 5, "train", 7))
        for other in (crop(wanted, 6, "train", 7), crop(wanted, 5, "heldout", 7), crop(wanted, 5, "train", 8)):
            assert not np.array_equal(first, other)


def test_the_same_in_another_process() -> None:
    code = (
        "import hashlib\n"
        "from greenroom.demo.board.component_types import TYPES\n"
        "from greenroom.demo.board.crops import Wanted, crop\n"
        "drawn = b''.join(crop(Wanted(one, 'good'), 9, 'heldout', 4).tobytes() for one in TYPES)\n"
        "print(hashlib.sha256(drawn).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    here = b"".join(crop(Wanted(one, GOOD), 9, "heldout", 4).tobytes() for one in TYPES)
    assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


def _drawn(type_: ComponentType, label: str, orientation: str = RIGHT) -> Image:
    """Without the light and noise of a crop; the pads and print are the same for all labels."""
    image = np.zeros((PIXELS, PIXELS, 3), np.float32)
    style = random_style(np.random.default_rng(1))
    draw_part(image, Frame(32, 32, 26), Wanted(type_, label, orientation), style, np.random.default_rng(2))
    return image


def _share_that_differs(one: Image, other: Image) -> float:
    return float((np.abs(one - other).max(-1) > 0.1).mean())


@_NAMED
def test_each_label_is_seen(type_: ComponentType) -> None:
    pictures = {label: _drawn(type_, label) for label in type_.labels}
    for label, other in combinations(type_.labels, 2):
        least = 0.06 if MISSING in (label, other) else 0.01
        assert _share_that_differs(pictures[label], pictures[other]) > least, (label, other)


@pytest.mark.parametrize("type_", [one for one in TYPES if one.orientation], ids=lambda one: one.name)
def test_how_a_part_lies_is_seen(type_: ComponentType) -> None:
    pictures = [_drawn(type_, GOOD, orientation) for orientation in ORIENTATIONS]
    for one, other in combinations(pictures, 2):
        assert _share_that_differs(one, other) > 0.02


@_NAMED
def test_labels_are_told_apart_by_a_type_and_good_comes_first(type_: ComponentType) -> None:
    assert type_.labels[0] == GOOD
    assert 3 <= len(set(type_.labels)) == len(type_.labels) <= 4
    assert sum(label not in (GOOD, MISSING, SHIFTED) for label in type_.labels) >= 1


def test_every_value_names_one_type() -> None:
    values = [value for one in TYPES for value in one.values]
    assert len(set(values)) == len(values)
    assert len(TYPES) == 16


def test_experts_are_one_a_type_and_those_that_types_share() -> None:
    experts = experts_of()
    assert [one.name for one in experts if not one.shared] == [one.name for one in TYPES]
    shared = {one.name: {type_.name for type_ in one.types} for one in experts if one.shared}
    assert shared == {
        "polarity": {"electrolytic", "diode", "led"},
        "first_pin": {"sot23", "soic8", "qfp", "qfn"},
        "keying": {"connector", "relay", "transformer"},
    }
    assert all(one.labels == tuple(ORIENTATIONS) for one in experts if one.shared)
    assert [one.name for one in experts_of(TYPES[:2])] == ["resistor", "capacitor"]


def test_a_board_is_scanned_to_and_fro_and_drawn_the_same_again() -> None:
    order = list(scan_order())
    assert len(set(order)) == ROWS * COLUMNS
    steps = [abs(a - c) + abs(b - d) for (a, b), (c, d) in pairwise(order)]
    assert set(steps) == {1}
    assert np.array_equal(board_picture(TYPES, 1), board_picture(TYPES, 1))
