"""FP8 E4M3: a sign, four bits of exponent and three of mantissa, without infinities. (OCP 8-bit Floating Point, FN.)

A scale is of a block of 128 outputs by 128 inputs, as DeepSeek-V3 and Qwen3-FP8 ship them, or of an output. A scale of
a whole matrix is kept as that of each of its outputs, since gates and ups are two matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.panels import (
    HALF,
    PANEL,
    UNIT,
    byte_codes,
    halves_of,
    halves_of_bytes,
    halves_of_lanes,
    lane_values,
)
from greenroom.moe.native.rows import GroupedCodes

BLOCK: Final = 128


class Fp8Blocks(MatrixFormat):
    """``stored``: codes, and scales ``float32[outputs, groups]`` that are the same for all outputs of a block."""

    name = "fp8-blocks"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        return GroupedCodes("fp8_blocks", BLOCK), GroupedCodes("fp8_blocks", BLOCK)

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        return ("codes", (panels, units, UNIT * PANEL), "uint8"), ("scales", (panels, groups, 2), "float32")

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, scales = stored
        of_halves = halves_of(scales, joined=joined)[:, :, 0]  # a half lies in one block
        return byte_codes(codes, joined=joined), of_halves.transpose(1, 2).contiguous()

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = parts
        by_unit = scales.repeat_interleave(BLOCK // UNIT, dim=1)[:, : codes.shape[1]]
        return _numbers(codes, by_unit.transpose(1, 2)[:, :, None, :, None])


class Fp8Rows(MatrixFormat):
    """``stored``: codes, and scales ``float32[outputs, 1]``."""

    name = "fp8-rows"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        return GroupedCodes("fp8_rows"), GroupedCodes("fp8_rows")

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        return ("codes", (panels, units, UNIT * PANEL), "uint8"), ("scales", (panels, groups, PANEL), "float32")

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, scales = stored
        return byte_codes(codes, joined=joined), lane_values(scales, joined=joined)

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = parts
        return _numbers(codes, halves_of_lanes(scales)[..., None])


def _numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``scales``: like ``[panels, 2, 16, units, 32]``."""
    panels, units, _ = codes.shape
    numbers = halves_of_bytes(codes).view(torch.float8_e4m3fn).float().view(panels, 2, HALF, units, UNIT)
    return numbers.mul_(scales).view(panels, 2, HALF, units * UNIT)


FP8_BLOCKS: Final = Fp8Blocks()
FP8_ROWS: Final = Fp8Rows()
