"""GGUF's Q4_K and Q6_K: 256 inputs of an output share numbers of half precision, which the scales of its groups are
multiplied with.

Both projections lie in panels as ``panels.py`` says. For every 256 inputs a panel has in its scales, and for Q4_K alike
in its minimums, the numbers of half precision of its 32 outputs (64 bytes), then what its groups have:

- Q4_K, 8 groups of 32 inputs, six bits each: for each pair of groups 32 bytes with their lower four bits, the first
  group's in the lower half; then for each four of them 32 bytes with their upper two bits, the first group's lowest.
- Q6_K, 16 groups of 16 inputs: for each group 32 signed bytes.

A unit of Q6_K is 16 inputs: 256 bytes with their lower four bits, then 128 with their upper two, each as in
``bit_codes``.

Real rows are whole blocks of 256. A last block may be a part here all the same, as in every format of panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.panels import PANEL, UNIT, bit_codes, halves_of_bits, halves_of_lanes, lane_values
from greenroom.moe.native.rows import GroupedCodes

SUPER: Final = 256
"""Inputs that share the numbers of half precision."""

_UNITS: Final = SUPER // UNIT
_GROUP: Final = UNIT // 2
"""Inputs of Q6_K that share a scale."""

_HALFS: Final = 2 * PANEL
_ZERO: Final = 32
"""What is taken from a code of Q6_K."""


class Q4K(MatrixFormat):
    """``stored``: codes; factors ``float16[outputs, blocks]``, scales ``uint8[outputs, blocks * 8]``; and the same of
    minimums.

    A number is ``code * (factor * scale) - factor_of_minimums * minimum`` in float32.
    """

    name = "q4_k"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        one = GroupedCodes("q4_k", UNIT)
        return one, one

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        of_groups = (panels, _blocks(units), _HALFS + _UNITS * 6 * PANEL // 8)
        return (
            ("codes", (panels, units, UNIT * PANEL // 2), "uint8"),
            ("scales", of_groups, "uint8"),
            ("minimums", of_groups, "uint8"),
        )

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, factors, scales, less, minimums = stored
        return (
            bit_codes(codes, 4, joined=joined),
            _six_bits(factors, scales, joined=joined),
            _six_bits(less, minimums, joined=joined),
        )

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, *of_groups = parts
        numbers = _by_group(halves_of_bits(codes, 4).float(), UNIT)
        scales, minimums = (_of_six_bits(one)[..., : codes.shape[1], None] for one in of_groups)
        made: torch.Tensor = scales * numbers - minimums
        return made.flatten(3)


class Q6K(MatrixFormat):
    """``stored``: codes, of which 32 is taken; factors ``float16[outputs, blocks]``; scales
    ``int8[outputs, blocks * 16]``.

    A number is ``(factor * scale) * (code - 32)`` in float32.
    """

    name = "q6_k"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        one = GroupedCodes("q6_k", _GROUP)
        return one, one

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        of_groups = (panels, _blocks(units), _HALFS + 2 * _UNITS * PANEL)
        return ("codes", (panels, groups, _GROUP * PANEL * 6 // 8), "uint8"), ("scales", of_groups, "uint8")

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, factors, scales = stored
        low, high = bit_codes(codes & 15, 4, joined=joined), bit_codes(codes >> 4, 2, joined=joined)
        panels, units, _ = low.shape
        both = torch.cat([one.reshape(panels, 2 * units, -1) for one in (low, high)], dim=-1)
        of_groups = lane_values(scales.view(torch.uint8), joined=joined).reshape(panels, _blocks(units), -1)
        return (
            both[:, : -(-codes.shape[1] // _GROUP)],
            torch.cat([_factors(factors, joined=joined), of_groups], dim=-1),
        )

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, of_groups = parts
        panels, groups, _ = codes.shape
        whole = functional.pad(codes, (0, 0, 0, groups % 2))
        low, high = (
            halves_of_bits(one.reshape(panels, whole.shape[1] // 2, -1), bits)
            for one, bits in ((whole[..., : _GROUP * PANEL // 2], 4), (whole[..., _GROUP * PANEL // 2 :], 2))
        )
        numbers = _by_group((low | high << 4).float() - _ZERO, _GROUP)[:, :, :, :groups]
        scales = _by_group(of_groups[..., _HALFS:].contiguous().view(torch.int8), PANEL)
        made: torch.Tensor = _times(of_groups, scales)[..., :groups, None] * numbers
        return made.flatten(3)


def _blocks(units: int) -> int:
    return -(-units // _UNITS)


def _by_group(values: torch.Tensor, width: int) -> torch.Tensor:
    """The last dimension in groups of ``width``."""
    return values.reshape(*values.shape[:-1], -1, width)


def _factors(factors: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """``float16[outputs, blocks]`` as bytes ``[panels, blocks, 64]``."""
    return lane_values(factors, joined=joined).contiguous().view(torch.uint8)


def _six_bits(factors: torch.Tensor, values: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """``float16[outputs, blocks]`` and ``uint8[outputs, blocks * 8]`` of six bits as ``uint8[panels, blocks, 256]``."""
    by_group = lane_values(values, joined=joined)
    by_group = by_group.view(len(by_group), -1, _UNITS, PANEL)  # panels, blocks, groups, lanes
    lows = (by_group[:, :, 0::2] & 15) | (by_group[:, :, 1::2] & 15) << 4
    tops = by_group >> 4
    highs = tops[:, :, 0::4] | tops[:, :, 1::4] << 2 | tops[:, :, 2::4] << 4 | tops[:, :, 3::4] << 6
    return torch.cat([_factors(factors, joined=joined), lows.flatten(2), highs.flatten(2)], dim=-1)


def _of_six_bits(packed: torch.Tensor) -> torch.Tensor:
    """The products of factors and what ``_six_bits`` was given: ``float32[panels, 2, 16, groups]``."""
    packed = packed.contiguous()
    panels, blocks, _ = packed.shape
    lows, highs = packed[..., _HALFS : _HALFS + _UNITS // 2 * PANEL], packed[..., _HALFS + _UNITS // 2 * PANEL :]
    low = torch.stack([_by_group(lows >> shift & 15, PANEL) for shift in (0, 4)], dim=3)
    high = torch.stack([_by_group(highs >> shift & 3, PANEL) for shift in (0, 2, 4, 6)], dim=3)
    return _times(packed, low.view(panels, blocks, _UNITS, PANEL) | high.view(panels, blocks, _UNITS, PANEL) << 4)


def _times(of_groups: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The factors at the begin of ``of_groups``, times ``values[panels, blocks, groups, 32]``: ``float32[panels, 2, 16,
    blocks * groups]``."""
    factors = of_groups[..., :_HALFS].contiguous().view(torch.float16).float()
    products: torch.Tensor = factors[:, :, None] * values.float()
    return halves_of_lanes(products.flatten(1, 2))


Q4_K: Final = Q4K()
Q6_K: Final = Q6K()
