"""Digits and letters of three by five dots, as parts and boards are marked with."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.demo.board.canvas import Field

_GLYPHS: Final = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71122",
    "8": "75757", "9": "75717", "A": "25755", "C": "74447", "D": "65556", "E": "74647", "F": "74644", "H": "55755",
    "K": "55655", "L": "44447", "N": "65555", "P": "65644", "Q": "25573", "R": "65655", "S": "34216", "T": "72222",
    "U": "55557", "X": "55255", "Y": "55222",
}  # fmt: skip
"""Five rows from above, each a digit whose three bits are its dots."""
LETTERS: Final = "ACDEFHKLNPRSTUXY"
DIGITS: Final = "0123456789"


def bitmap(text: str) -> Field:
    """``[5, columns]``, 1 where a dot is, a column free between two characters. Raises KeyError for one it has not."""
    columns: list[list[int]] = []
    for character in text:
        rows = [int(row) for row in _GLYPHS[character]]
        columns += [[row >> bit & 1 for row in rows] for bit in (2, 1, 0)]
        columns.append([0] * 5)
    return np.array(columns[:-1], np.float32).T


def random_text(rng: np.random.Generator, pattern: str) -> str:
    """``9`` in the pattern becomes any digit, ``A`` any letter; anything else stays."""
    choices = {"9": DIGITS, "A": LETTERS}
    return "".join(choices[one][rng.integers(len(choices[one]))] if one in choices else one for one in pattern)
