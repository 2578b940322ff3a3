"""Matrices of bf16 with some rare exponents, and as lossless records have them."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.lossless.record import LosslessFormat

LOSSLESS_FORMATS: Final = {one.name: one for one in (LOSSLESS, LOSSLESS_PLANES)}


def matrix(seed: int, outputs: int, inputs: int, rare: int = 8, *, finite: bool = True) -> torch.Tensor:
    """Normal, but for ``rare`` weights somewhere, which may have any exponent. Finite ones are no larger than the
    others."""
    random = np.random.default_rng(seed)
    numbers = torch.from_numpy(random.normal(0.0, inputs**-0.5, (outputs, inputs))).bfloat16()
    bits = numbers.view(torch.int16).view(-1)
    for place in random.integers(0, bits.numel(), rare).tolist():
        anything = int(random.integers(0, 1 << 16))
        bits[place] = torch.tensor(anything & 0xBFFF if finite else anything, dtype=torch.int32).short()
    return numbers


def codes_of(kept: LosslessFormat, numbers: torch.Tensor, *, joined: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``joined``: the matrix is gates, then as many ups."""
    name = "gate_up_proj" if joined else "down_proj"
    codes, exponents = kept.encode(ExpertTensor(name, tuple(numbers.shape), torch.bfloat16), numbers).values()
    return codes, exponents


def lossless_record(kept: LosslessFormat, numbers: ExpertWeights) -> ExpertWeights:
    up, down = numbers
    return *codes_of(kept, up, joined=True), *codes_of(kept, down)


def swiglu_layer(hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> MoeLayer:
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    return MoeLayer("experts", 1, 1, tuple(ExpertTensor(name, shape, dtype) for name, shape in shapes.items()), True)
