"""A board's folder without its picture, which takes seconds to draw and to compress."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.demo.board import make


def plain_picture(patch: pytest.MonkeyPatch) -> None:
    """The picture of boards that are made from now on is small and black."""
    patch.setattr(make, "board_picture", lambda types, seed: np.zeros((8, 8, 3), dtype=np.uint8))
