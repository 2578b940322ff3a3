"""The numbers that GGUF's blocks mean: those of ggml's own ``dequantize_row_*``, to the bit in float32.

A type's function gets blocks ``[blocks, bytes]`` (uint8) and gives their numbers ``[blocks, numbers]`` (float32). Half
precision scales lie at even bytes of even blocks, so they are seen where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from greenroom.gguf.block_types import BlockType

_AT_ONCE: Final = 1 << 18
"""Numbers that are made at a time: few enough that what they take meanwhile stays in the processor's cache."""

_NOT_A_NUMBER: Final = 255
"""Of the scales of 8 bits (E8M0)."""


class NotFinite(ValueError):
    """A scale that is no number, or one whose numbers the dtype lacks."""


def numbers_of(data: torch.Tensor, block: BlockType, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All numbers of whole blocks (uint8), one after the other, rounded once to ``dtype``.

    Raises NotFinite. ``block``: one of ``SERVED``.
    """
    make = _NUMBERS[block.name]
    blocks = data.view(-1, block.nbytes)
    made = torch.empty((len(blocks), block.numbers), dtype=dtype)
    step = max(1, _AT_ONCE // block.numbers)
    for first in range(0, len(blocks), step):
        into = made[first : first + step]
        into.copy_(make(blocks[first : first + step]).view(into.shape))
        # Whatever is not finite makes such a sum, and sums are cheaper than a flag for each number.
        if not bool(torch.isfinite(into.sum(dtype=torch.float64))):
            raise NotFinite("has a scale that is no number, or too large a one")
    return made.view(-1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """``[blocks, 1]``."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def fields(data: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """All numbers of ``bits`` bits, those of ``width`` bytes after those of the same bytes' next lower bits: uint8
    ``[blocks, bytes / width, 8 / bits, width]``."""
    # Eight bytes at a time where there are as many: what the shift brings from others is masked.
    together, item = (8, torch.int64) if width % 8 == 0 else (1, torch.uint8)
    own = data.reshape(len(data), -1, width).clone(memory_format=torch.contiguous_format)  # at a whole word's place
    several = own.view(item)
    mask = sum(((1 << bits) - 1) << 8 * place for place in range(together))
    found = [several >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(found, dim=2).view(torch.uint8)


Fields = Callable[[torch.Tensor, int, int], torch.Tensor]
"""What does as ``fields``."""


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Each bit of each byte, the lowest first, as uint8."""
    return ((data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(len(data), -1)


def _nibbles(blocks: torch.Tensor, at: int, fields: Fields = fields) -> torch.Tensor:
    """Of the 16 bytes from ``at`` on: the low halves, then the high ones."""
    return fields(blocks[:, at : at + 16], 16, 4).view(-1, 32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks, 2).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks, 4).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks, 6) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks, 8) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def q8_0_codes(blocks: torch.Tensor, fields: Fields = fields) -> tuple[torch.Tensor, torch.Tensor]:
    """``int8[blocks, 32]``, and their scale ``float16[blocks, 1]``."""
    return blocks[:, 2:].view(torch.int8), blocks[:, :2].view(torch.float16)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    codes, scales = q8_0_codes(blocks)
    return codes.float() * scales.float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    factors = (_half(blocks, 80) * (scales & 15).float())[:, :, None]
    least = (_half(blocks, 82) * (scales >> 4).float())[:, :, None]
    codes = fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16)
    return factors * codes.float() - least


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = fields(blocks[:, 96:104], 8, 4).view(-1, 16)
    high = fields(blocks[:, 104:108], 4, 2).view(-1, 16)
    factors = _half(blocks, 108) * ((low | high << 4).float() - 32)
    codes = fields(blocks[:, 32:96], 32, 2).view(-1, 16, 16).float()
    lacking = 1 - fields(blocks[:, :32], 32, 1).view(-1, 16, 16).float()  # a bit that is clear takes 4 away
    return factors[:, :, None] * (codes - 4 * lacking)


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of the eight parts of a block of Q4_K or Q5_K: ``uint8[blocks, 8]`` each."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)


def _of_parts(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``codes[blocks, 8, 32]`` of Q4_K or Q5_K."""
    scales, minimums = _six_bits(blocks)
    factors = (_half(blocks, 0) * scales.float())[:, :, None]
    return factors * codes.float() - (_half(blocks, 2) * minimums.float())[:, :, None]


class Q4KCodes(NamedTuple):
    """``codes``: ``uint8[blocks, 256]``. A number is a code times its scale and the block's ``factors``, less its
    minimum times ``less``: both ``float16[blocks, 1]``. ``scales`` and ``minimums``: of 32 codes, ``uint8[blocks,
    8]``."""

    codes: torch.Tensor
    factors: torch.Tensor
    scales: torch.Tensor
    less: torch.Tensor
    minimums: torch.Tensor


def q4_k_codes(blocks: torch.Tensor, fields: Fields = fields) -> Q4KCodes:
    codes = fields(blocks[:, 16:], 32, 4).view(-1, 256)
    scales, minimums = _six_bits(blocks)
    return Q4KCodes(codes, blocks[:, :2].view(torch.float16), scales, blocks[:, 2:4].view(torch.float16), minimums)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _of_parts(blocks, fields(blocks[:, 16:], 32, 4).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = fields(blocks[:, 48:], 32, 4).view(-1, 8, 32)
    high = fields(blocks[:, 16:48], 32, 1).view(-1, 8, 32)
    return _of_parts(blocks, low | high << 4)


class Q6KCodes(NamedTuple):
    """``codes``: ``uint8[blocks, 256]``, of which 32 is taken. ``factors``: ``float16[blocks, 1]``. ``scales``: of 16
    codes, ``int8[blocks, 16]``."""

    codes: torch.Tensor
    factors: torch.Tensor
    scales: torch.Tensor


def q6_k_codes(blocks: torch.Tensor, fields: Fields = fields) -> Q6KCodes:
    low = fields(blocks[:, :128], 64, 4).reshape(-1, 8, 32)
    high = fields(blocks[:, 128:192], 32, 2).view(-1, 8, 32)
    codes = low.bitwise_or_(high.bitwise_left_shift_(4)).view(-1, 256)
    return Q6KCodes(codes, blocks[:, 208:].view(torch.float16), blocks[:, 192:208].view(torch.int8))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes, factors, scales = q6_k_codes(blocks)
    return (factors.float() * scales.float())[:, :, None] * (codes.float() - 32).view(-1, 16, 16)


_IQ4_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * torch.tensor(_IQ4_LEVELS, dtype=torch.float32)[_nibbles(blocks, 2).int()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = fields(blocks[:, 4:8], 1, 4).view(-1, 8)
    high = fields(blocks[:, 2:4], 1, 2).view(-1, 8)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    codes = fields(blocks[:, 8:], 16, 4).view(-1, 8, 32)
    return scales[:, :, None] * torch.tensor(_IQ4_LEVELS, dtype=torch.float32)[codes.int()]


def mxfp4_codes(blocks: torch.Tensor, fields: Fields = fields) -> tuple[torch.Tensor, torch.Tensor]:
    """``uint8[blocks, 32]`` (E2M1), and their scale ``uint8[blocks, 1]`` (E8M0)."""
    return _nibbles(blocks, 1, fields), blocks[:, :1]


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    exponents = blocks[:, :1].int()
    # Half of 2 ** (exponent - 127), by its bits, since the levels are twice the numbers of the codes.
    halves = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    halves = torch.where(exponents == _NOT_A_NUMBER, torch.nan, halves)
    return halves * levels[_nibbles(blocks, 1).int()]


_NUMBERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

SERVED: Final = tuple(_NUMBERS)
"""By name; beside those whose numbers are stored by themselves."""
