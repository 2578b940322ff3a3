"""bf16 in 0.72 of its bytes without losing a bit, for processors that expand bytes and multiply bf16.

As ``codes.py``, with three bits of exponent. A matrix's seven commonest exponents are those of all but about 2.3 %
of its weights. The eighth place, all three bits, stands for the others. They are a byte each, in the order of the
codes, so none has to say where it belongs: the processor puts them there by the bits of the places.

A record has two tensors of each matrix, laid out for the compiled products (``native/lossless_planes.inc``):

- ``codes[panels, units, 2, 88]``: panels and halves as ``panels.py`` has them. A unit is four inputs. Of each half it
  has 64 bytes of sign and mantissa, then three planes of 64 bits, little-endian: bit i of a plane is one of the place
  of weight i, the lowest bit first. Weight ``16 q + 8 w + 2 n + b`` is that of output ``4 q + n`` and input
  ``2 w + b``. Outputs and inputs that are missing at the end have the table's first exponent.
- ``exponents[lines, 64]``: 16 bytes of table, of which the first seven are used. Then 32-bit numbers, little-endian:
  for each panel where its list begins. Then the lists, a byte an exponent, and a line that may be read beyond them.
"""

from __future__ import annotations

from typing import Final

import torch

from greenroom.moe.formats.lossless.record import AT_ONCE, LINE, PLACES, LosslessFormat, bits_of
from greenroom.moe.formats.panels import HALF, PANEL, panels_of, rows_of

_INPUTS, _PLANE_BYTES, _PLANES = 4, 8, 3
_WEIGHTS = HALF * _INPUTS
_BLOCK = _WEIGHTS + _PLANES * _PLANE_BYTES

_ONE_OF: Final = 18
"""There is room for one listed weight of so many, 2.8 % of bf16's bytes. In the bundled model's worst expert one in 33
is listed."""
_SPARE: Final = 64
"""Room beside: of a small matrix a larger share may be rare by chance."""

_EXPANDING_BYTES: Final = 40
"""What torch takes to expand, of a weight meanwhile, of some at a time."""


class LosslessPlanes(LosslessFormat):
    name = "lossless-planes"
    version = 1
    planes = True
    listed = (1 << _PLANES) - 1
    inputs_at_once = _INPUTS

    def room(self, outputs: int, inputs: int) -> int:
        return _SPARE + outputs * inputs // _ONE_OF

    def codes_shape(self, outputs: int, inputs: int, *, joined: bool) -> tuple[int, ...]:
        return panels_of(outputs, joined=joined), _units(inputs), 2, _BLOCK

    def lines(self, outputs: int, inputs: int, *, joined: bool) -> int:
        listed = PLACES + 4 * panels_of(outputs, joined=joined) + self.room(outputs, inputs)
        return -(-listed // LINE) + 1

    def expand_by_torch(
        self, codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor, *, joined: bool
    ) -> None:
        outputs, inputs = into.shape
        panels, flat = len(codes), exponents.view(-1)
        table, starts = flat[:PLACES].short(), flat[PLACES : PLACES + 4 * panels].view(torch.int32)
        listed = flat[PLACES + 4 * panels :]
        shifts = torch.arange(8, dtype=torch.uint8, device=into.device)
        step = max(1, AT_ONCE // (_units(inputs) * 2 * _WEIGHTS))
        for first in range(0, panels, step):
            own = codes[first : first + step]
            count, units = own.shape[:2]
            planes = own[..., _WEIGHTS:].reshape(count, units, 2, _PLANES, _PLANE_BYTES, 1) >> shifts & 1
            of_weights = planes.view(count, units, 2, _PLANES, _WEIGHTS)
            places = of_weights[..., 0, :] | of_weights[..., 1, :] << 1 | of_weights[..., 2, :] << 2
            rare = places == self.listed
            at = rare.view(-1).cumsum(0, dtype=torch.int32) + (starts[first] - 1)
            exponent = torch.where(rare, listed[at.clamp_(min=0)].view_as(rare).short(), table[places.int()])
            bits = bits_of(own[..., :_WEIGHTS], exponent)
            # [count, units, 2, quarter, word, output, weight] to [count, 2, 16, inputs]
            halves = bits.view(count, units, 2, 4, 2, 4, 2).permute(0, 2, 3, 5, 1, 4, 6)
            rows = halves.reshape(count, 2, HALF, units * _INPUTS)[..., :inputs]
            target = into.view(torch.int16)
            if joined:
                both = target.view(2, outputs // 2, inputs)[:, first * HALF : (first + step) * HALF]
                both.copy_(rows.transpose(0, 1).reshape(2, count * HALF, inputs)[:, : both.shape[1]])
            else:
                neighbours = target[first * PANEL : (first + step) * PANEL]
                neighbours.copy_(rows_of(rows, len(neighbours), joined=False))

    def _expanding_bytes(self, outputs: int, inputs: int) -> int:
        return max(AT_ONCE, _units(inputs) * 2 * _WEIGHTS) * _EXPANDING_BYTES


LOSSLESS_PLANES: Final = LosslessPlanes()


def _units(inputs: int) -> int:
    return -(-inputs // _INPUTS)
