"""What is kept of a sequence for a kind to be made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Kept = npt.NDArray[np.integer[Any]]
"""Of one sequence. The axes behind the first are the same for all sequences of a model."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence. ``task``: its type."""

    task: str
    array: Kept

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is the same for all sequences of its model."""
        return self.array.shape[1:]
