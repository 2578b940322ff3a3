"""What is kept of a sequence for a kind to be made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Kept = npt.NDArray[np.integer[Any]]
"""Of one sequence. The axes behind the first are the same for all sequences of a model."""

Tokens = npt.NDArray[np.uint32]
"""[rows]: the id of each row's input."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence. ``task``: its type. Of kinds that keep tokens, ``tokens[rows]`` of the rows of ``array``, the first
    ``prompt_rows`` of which are the prompt's. They are people's text: in memory only."""

    task: str
    array: Kept
    tokens: Tokens | None = None
    prompt_rows: int = 0

    @property
    def nbytes(self) -> int:
        return self.array.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is the same for all sequences of its model."""
        return self.array.shape[1:]
