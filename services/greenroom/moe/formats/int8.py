"""Signed codes of 8 bits, with a scale of 16 bits for each 32 that neighbour along the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.panels import HALF, PANEL, UNIT, byte_codes, lane_values
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
        numbers = codes.view(torch.int8).view(panels, units, UNIT, 2, HALF).permute(0, 3, 4, 1, 2).float()
        by_group = scales.view(panels, units, 2, HALF).permute(0, 2, 3, 1).float()
        return (numbers * by_group[..., None]).reshape(panels, 2, HALF, units * UNIT)


INT8: Final = Int8()
