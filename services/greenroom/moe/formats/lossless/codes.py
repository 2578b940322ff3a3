"""bf16 in three quarters of its bytes without losing a bit: a byte of sign and mantissa, half a byte of exponent.

The exponents of a trained matrix are few: its 15 commonest are those of all but one weight in thousands. So a weight
has its exponent's place in a table of these. The last place stands for all others, which are listed beside.

A record has two tensors of each matrix ``[outputs, inputs]``, laid out for the compiled products
(``native/lossless_products.inc``):

- ``codes[outputs, inputs * 3 / 2]``: of each row first a byte a weight, its sign and mantissa, then half a byte a
  weight, its exponent's place. Of every 64 weights, which are eight groups of eight, the groups 0 and 4 lie side by
  side, then 1 and 5, 2 and 6, 3 and 7; a byte of places has one of the first 32 as they lie in its low half, and one of
  the last 32 in its high half. What is left of a row lies in order, the first of two in the low half.
- ``exponents[lines, 64]``: 16 bytes of table, the last one 0. Then 32-bit numbers, little-endian: for each *strip* of
  eight rows where its list ends, and the lists. An entry has a weight's column in its lowest 16 bits, its row in the
  strip in the next 8, and its exponent.

Each record of a layer has room for the same number of entries. Those that are left over repeat the matrix's first
weight, so a device need not ask how many there are.
"""

from __future__ import annotations

from typing import Final

import torch

from greenroom.moe.formats.lossless.record import AT_ONCE, LINE, PLACES, LosslessFormat, bits_of

_BLOCK, _STRIP = 64, 8

_ONE_OF: Final = 512
"""There is room for one listed weight of so many, which is 0.4 % of bf16's bytes."""
_LEAST_ROOM: Final = 64

_EXPANDING_BYTES, _LISTING_BYTES = 24, 64
"""What torch takes to expand: of a weight meanwhile, of some at a time; and of an entry."""


class Lossless(LosslessFormat):
    name = "lossless"
    version = 1
    planes = False
    listed = PLACES - 1
    inputs_at_once = _BLOCK

    def room(self, outputs: int, inputs: int) -> int:
        return max(_LEAST_ROOM, outputs * inputs // _ONE_OF)

    def codes_shape(self, outputs: int, inputs: int, *, joined: bool) -> tuple[int, ...]:
        return outputs, inputs // 2 * 3

    def lines(self, outputs: int, inputs: int, *, joined: bool) -> int:
        return -(-(PLACES + 4 * (_strips(outputs) + self.room(outputs, inputs))) // LINE)

    def expand_by_torch(
        self, codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor, *, joined: bool
    ) -> None:
        outputs, inputs = into.shape
        bits, flat = into.view(torch.int16), exponents.view(-1)
        table = flat[:PLACES].short()
        step = max(1, AT_ONCE // inputs)
        for first in range(0, outputs, step):
            rest, places = _in_order(codes[first : first + step], inputs)
            bits[first : first + step] = bits_of(rest, table[places.int()])
        words, strips = flat[PLACES:].view(torch.int32), _strips(outputs)
        ends, listed = words[:strips], words[strips : strips + self.room(outputs, inputs)]
        numbers = torch.arange(len(listed), dtype=torch.int32, device=into.device)
        strip = torch.searchsorted(ends, numbers, right=True)
        rows = torch.where(numbers < ends[-1], strip, 0) * _STRIP + (listed >> 16 & 0xFF)
        at = rows * inputs + (listed & 0xFFFF)
        whole = bits.view(-1)
        whole[at] = whole[at] & ~(0xFF << 7) | ((listed >> 24 & 0xFF) << 7).short()

    def _expanding_bytes(self, outputs: int, inputs: int) -> int:
        return max(AT_ONCE, inputs) * _EXPANDING_BYTES + self.room(outputs, inputs) * _LISTING_BYTES


LOSSLESS: Final = Lossless()


def _in_order(codes: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of sign and mantissa, and the places, each ``[rows, inputs]`` in the order of the weights."""
    rows, blocks = len(codes), inputs // _BLOCK
    whole = blocks * _BLOCK

    def ordered(lying: torch.Tensor) -> torch.Tensor:
        return lying.reshape(rows, blocks, _BLOCK // 16, 2, 8).transpose(2, 3).reshape(rows, whole)

    rest, halves = codes[:, :inputs], codes[:, inputs:]
    of_blocks = halves[:, : whole // 2].reshape(rows, blocks, _BLOCK // 2)
    of_others = halves[:, whole // 2 :, None]
    places = [
        ordered(torch.cat([of_blocks & 15, of_blocks >> 4], dim=2)),
        torch.cat([of_others & 15, of_others >> 4], dim=2).reshape(rows, inputs - whole),
    ]
    return torch.cat([ordered(rest[:, :whole]), rest[:, whole:]], dim=1), torch.cat(places, dim=1)


def _strips(outputs: int) -> int:
    return -(-outputs // _STRIP)
