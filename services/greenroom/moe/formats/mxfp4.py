"""MXFP4 as gpt-oss ships it: codes of 4 bits, and for each 32 that neighbour along the inputs a scale of 8 bits.

A code is a sign, two bits of exponent and one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale is an exponent
(E8M0): ``2 ** (scale - 127)``; 255 is no number. (OCP Microscaling Formats v1.0.)

In a record the codes lie in the order in which the compiled products use them (``native/mxfp4_products.inc``), and the
scales in a tensor of their own. Both have a *panel* of 32 outputs after the other, and in a panel a *unit* of 32 inputs
after the other:

- ``codes[panels, units, 512]``: eight rows of 16 words of 32 bits, little-endian. Byte ``b`` of word ``w`` in row ``r``
  has input ``4 r + b`` of the unit, in its low half for output ``2 w`` of the panel, in its high half for ``2 w + 1``.
  So they are what ``panels.py`` says, of panels whose left half is the even outputs.
- ``scales[panels, units, 32]``: those of the panel's even outputs, then those of the odd ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from greenroom.core.errors import CorruptCheckpoint
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.byte_moves import fields
from greenroom.moe.formats.expert_format import BadCodes, ExpertFormat, plain_record
from greenroom.moe.formats.panels import bit_codes

BLOCK: Final = 32
"""Inputs that share a scale, and outputs of a panel."""

NOT_A_NUMBER: Final = 255
_BIAS: Final = 127
_LARGEST: Final = 6.0
_BITS: Final = 4
_ROWS, _WORDS, _LANE_INPUTS = 8, 16, 4  # of a unit

_AT_ONCE: Final = 1 << 20
"""Weights that are expanded at a time: few enough that what they take meanwhile stays in the processor's cache."""

_EXPANDING_BYTES: Final = 8
"""Of a weight meanwhile. An eighth of them is made at a time, by up to six numbers of 32 bits each; and the scales."""


class Mxfp4(ExpertFormat):
    """Matrices ``[inputs, outputs]`` with both widths multiples of 32. Whatever else an expert has is in its dtype."""

    name = "mxfp4"
    version = 1

    def record(self, layer: MoeLayer) -> RecordLayout:
        return RecordLayout.of(self._record(layer))

    def _record(self, layer: MoeLayer) -> Iterator[tuple[str, tuple[int, ...], str]]:
        for tensor in layer.tensors:
            if not _is_coded(tensor):
                yield plain_record(tensor)
                continue
            inputs, outputs = tensor.shape
            yield f"{tensor.name}_codes", (outputs // BLOCK, inputs // BLOCK, BLOCK * BLOCK // 2), "uint8"
            yield f"{tensor.name}_scales", (outputs // BLOCK, inputs // BLOCK, BLOCK), "uint8"

    def stored_shapes(self, tensor: ExpertTensor) -> tuple[tuple[int, ...], ...]:
        """Blocks ``[outputs, inputs / 32, 16]``, where a byte has two neighbouring inputs, the first one in its low
        half, and scales ``[outputs, inputs / 32]``."""
        if not _is_coded(tensor):
            return ()
        inputs, outputs = tensor.shape
        if inputs % BLOCK or outputs % BLOCK:
            raise CorruptCheckpoint(
                f"an expert's {tensor.name} is {inputs} by {outputs} by the configuration, and MXFP4 needs multiples "
                f"of {BLOCK}"
            )
        return (outputs, inputs // BLOCK, BLOCK // 2), (outputs, inputs // BLOCK)

    def check(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> None:
        blocks, scales = (part.view(shape) for part, shape in zip(stored, self.stored_shapes(tensor), strict=True))
        # With such scales any code is a number of the dtype.
        most = torch.finfo(tensor.dtype).max
        safe = _BIAS + math.frexp(most / _LARGEST)[1] - 1
        if int(scales.max()) <= safe:
            return
        if bool((scales == NOT_A_NUMBER).any()):
            raise BadCodes(1, f"has a scale of {NOT_A_NUMBER}, which is no number")
        large = scales > safe
        magnitudes = torch.maximum(blocks[large] & 7, blocks[large] >> 4 & 7).amax(dim=-1)
        largest = _numbers_of(magnitudes.int()).double() * torch.exp2(scales[large].double() - _BIAS)
        if bool((largest > most).any()):
            worst = int(scales[large][largest.argmax()])
            raise BadCodes(1, f"has a scale of {worst}, whose weights {tensor.dtype} lacks")

    def make(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        blocks, scales = (part.view(shape) for part, shape in zip(stored, self.stored_shapes(tensor), strict=True))
        inputs, outputs = tensor.shape
        panels, units = outputs // BLOCK, inputs // BLOCK
        by_parity = blocks.view(panels, _WORDS, 2, inputs // 2).transpose(1, 2).reshape(outputs, inputs // 2)
        codes = bit_codes(fields(by_parity, 1, _BITS).view(outputs, inputs), _BITS, joined=False)
        lanes = scales.view(panels, _WORDS, 2, units).permute(0, 3, 2, 1)
        return {f"{tensor.name}_codes": codes, f"{tensor.name}_scales": lanes.reshape(panels, units, BLOCK)}

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        left = iter(weights)
        for tensor, target in zip(layer.tensors, into, strict=True):
            if _is_coded(tensor):
                _expand(next(left), next(left), target)
            else:
                target[:] = next(left)

    def expanding_bytes(self, layer: MoeLayer) -> int:
        widest = max(tensor.shape[0] for tensor in layer.tensors if _is_coded(tensor))
        return max(_AT_ONCE, BLOCK * widest) * _EXPANDING_BYTES


MXFP4: Final = Mxfp4()


def _is_coded(tensor: ExpertTensor) -> bool:
    return len(tensor.shape) == 2


def _expand(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """Exact: products with powers of two, of which ``into``'s dtype has each. Some panels at a time."""
    panels, units, _ = codes.shape
    step = max(1, _AT_ONCE // (units * BLOCK * BLOCK))
    places = into.view(units, _ROWS, _LANE_INPUTS, panels, _WORDS, 2)
    for first in range(0, panels, step):
        some = slice(first, first + step)
        words = codes[some].view(torch.int32).view(-1, units, _ROWS, _WORDS)
        by_parity = _scales_of(scales[some]).view(-1, units, 2, 1, _WORDS)
        for place in range(_LANE_INPUTS):
            for parity in range(2):
                numbers = _numbers_of(words >> 8 * place + 4 * parity)
                numbers *= by_parity[:, :, parity]
                places[:, :, place, some, :, parity] = numbers.permute(1, 2, 0, 3)


def _numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """In float32, of codes in the lowest bits of int32. Computed: a table would have to be brought to a device."""
    magnitudes = (codes & 7).float()
    # Twice the numbers are 0, 1, 2, 3, 4, 6, 8, 12: steps of 1, from 4 on of 2, and the last one of 4.
    doubled = magnitudes + (magnitudes - 4).clamp_(min=0)
    doubled.add_((magnitudes - 6).clamp_(min=0), alpha=2)
    return doubled * (0.5 - (codes & 8).float() / 8)


def _scales_of(codes: torch.Tensor) -> torch.Tensor:
    """In float32, by their bits: powers that a device computes need not be exact."""
    exponents = codes.int()
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
