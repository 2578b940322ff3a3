"""MXFP4 of SwiGLU experts: codes of 4 bits (E2M1), and a scale of 8 bits (E8M0) for 32 that neighbour along the inputs.

``mxfp4.py`` says what they mean. gpt-oss's experts, whose matrices and activation are others, have their own records
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.panels import HALF, PANEL, UNIT, bit_codes, halves_of_bits, halves_of_lanes, lane_values
from greenroom.moe.native.rows import GroupedCodes

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Fp4(MatrixFormat):
    """``stored``: codes, and scales ``uint8[outputs, groups]``. A number is their product. Code 8 is -0."""

    name = "fp4"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        return GroupedCodes("fp4", UNIT), GroupedCodes("fp4", UNIT)

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        return ("codes", (panels, units, UNIT * PANEL // 2), "uint8"), ("scales", (panels, groups, PANEL), "uint8")

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, scales = stored
        return bit_codes(codes, 4, joined=joined), lane_values(scales, joined=joined)

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = parts
        magnitudes = torch.tensor(_MAGNITUDES, device=codes.device)
        panels, units, _ = codes.shape
        places = halves_of_bits(codes, 4).view(-1).int()
        numbers = torch.cat([magnitudes, -magnitudes]).index_select(0, places)
        del places
        exponents = halves_of_lanes(scales)[..., None].int()
        # By their bits; code 0 is a denormal number.
        factors = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
        return numbers.view(panels, 2, HALF, units, UNIT).mul_(factors).view(panels, 2, HALF, units * UNIT)


FP4: Final = Fp4()
