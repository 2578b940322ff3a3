"""Real traces and prompts, which are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def real_data(name: str) -> Path:
    """The file ``name`` in the folder that GREENROOM_DATA names; without one the test is skipped."""
    __tracebackhide__ = True  # or the summary names this file for the test
    folder = os.environ.get("GREENROOM_DATA")
    if folder is None:
        pytest.skip(f"GREENROOM_DATA does not name the folder with {name}")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"GREENROOM_DATA has no {name}")
    return path
