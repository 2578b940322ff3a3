"""What the services must know of a collaboration of experts: what it takes and what it gives."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from greenroom.core.units import KIB

CALL_PARAMETERS: Final = ("priority", "slo_e2e_ms", "timeout")
"""Of a call, beside the router's."""
TAKEN_NAMES: Final = frozenset({*CALL_PARAMETERS, "binary_data_output", "image", "text"})
"""What a router's parameter can not be called: it comes beside these, or as an input beside these."""
MAX_VALUES: Final = 16_384
MAX_VALUES_BYTES: Final = 896 * KIB
"""Of all together in UTF-8, each with what encodes it. They are announced in one record, which has at most 1 MiB."""
VALUE_BYTES: Final = 3
"""What encodes one, beside itself."""


class InputKind(StrEnum):
    """What an input is."""

    IMAGE = "image"
    """A PNG or JPEG file."""
    TEXT = "text"
    """UTF-8."""


class OutputKind(StrEnum):
    """What an expert may give. By these names clients ask for it."""

    PATH = "path"
    LABEL = "label"
    SCORE = "score"
    SCORES = "scores"
    BOXES = "boxes"
    EMBEDDING = "embedding"


class CollaborationCard(msgspec.Struct, frozen=True, kw_only=True):
    """``takes``: the kinds of input that a request has, one of each. ``parameter``: the router's; empty where a model
    routes. ``values``: those that the router knows; empty: any. ``gives``: the outputs that its experts have.
    ``max_pixels``: of an image, width times height; 0: any."""

    takes: Annotated[tuple[InputKind, ...], Meta(min_length=1)]
    parameter: Annotated[str, Meta(max_length=256)] = ""
    values: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MAX_VALUES)] = ()
    gives: tuple[OutputKind, ...] = (OutputKind.PATH, OutputKind.LABEL, OutputKind.SCORE)
    max_pixels: Annotated[int, Meta(ge=0)] = 0
