"""Pictures as PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError


def check_encoder() -> None:
    """Raises GreenroomError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        raise GreenroomError("pictures need Pillow: pip install 'greenroom[coe]'") from None


def write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    """``pixels``: ``[height, width, 3]``. Raises OSError."""
    import PIL.Image

    PIL.Image.fromarray(pixels).save(path, format="PNG", optimize=True)
