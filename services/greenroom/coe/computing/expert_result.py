"""What an expert says of an input. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Box:
    """An object in an image: ``left``, ``top``, ``right``, ``bottom`` in pixels of the upright image."""

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class ExpertResult:
    """``label``, ``score``: what edges of the graph look at; None where there is none, as of an embedding.

    ``scores``: by every label. ``boxes``: of a detector, the best one first. ``embedding``: ``[E]``.

    A detector's label and score are those of its best box, and None where no box is good enough: then the request takes
    an edge without conditions, or ends. Its ``scores`` are those of each label's best box.
    """

    label: str | None = None
    score: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    boxes: tuple[Box, ...] = ()
    embedding: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One expert's part of a request."""

    expert: str
    result: ExpertResult
