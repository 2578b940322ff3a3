"""Signed codes of 8 bits, with a scale of 16 bits for each 32 that neighbour along the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.panels import HALF, PANEL, UNIT, byte_codes, halves_of_bytes, halves_of_lanes, lane_values
from greenroom.moe.native.rows import GroupedCodes


class Int8(MatrixFormat):
    """``stored``: codes in two's complement, and scales in float16. A number is their product, to the bit."""

    name = "int8"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        return GroupedCodes("int8", UNIT), GroupedCodes("int8", UNIT)

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        return ("codes", (panels, units, UNIT * PANEL), "uint8"), ("scales", (panels, groups, PANEL), "float16")

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, scales = stored
        return byte_codes(codes, joined=joined), lane_values(scales, joined=joined)

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = parts
        panels, units, _ = codes.shape
        numbers = halves_of_bytes(codes).view(torch.int8).float().view(panels, 2, HALF, units, UNIT)
        return numbers.mul_(halves_of_lanes(scales).float()[..., None]).view(panels, 2, HALF, units * UNIT)


INT8: Final = Int8()
