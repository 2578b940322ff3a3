"""A collaboration of small experts that inspect a circuit board: drawn, trained, and bundled with the package.

The parts are drawn (``crops.py``), a ResNet is trained for each type and three for what types have in common
(``training.py``), and a definition file says which comes after which (``definition.py``). docs/architecture/coe.md.
"""

from __future__ import annotations

from pathlib import Path

DEFINITION_NAME = "board.toml"


def bundled_board_path() -> Path:
    """The definition file of the bundled experts, which lie beside it; they come with the package."""
    return Path(__file__).parent / DEFINITION_NAME
