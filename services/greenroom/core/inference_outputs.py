"""What a collaboration of experts finds for one request: the fields that an outcome of the journal carries."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Label = Annotated[str, Meta(max_length=1024)]
Score = float
"""Of a class between 0 and 1; of a regression its value."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """Something found in an image. Corners in pixels of the image as it came, from its upper left."""

    label: Label
    score: Score
    left: float
    top: float
    right: float
    bottom: float


class InferenceOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """``path``: the experts that the request went through, in order. The rest is of the last of them: the ``label`` it
    gave, with its ``score``; ``scores``: those of all labels that it tells, best first; ``boxes``: best first;
    ``embedding``: float32[n], little-endian. A field is empty, or None, where that expert has no such result."""

    path: Annotated[tuple[Label, ...], Meta(max_length=1024)] = ()
    label: Label | None = None
    score: Score | None = None
    scores: Annotated[tuple[tuple[Label, Score], ...], Meta(max_length=65_536)] = ()
    boxes: Annotated[tuple[Box, ...], Meta(max_length=65_536)] = ()
    embedding: bytes = b""
