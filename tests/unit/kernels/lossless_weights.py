"""Matrices of bf16 with some rare exponents, and as a lossless record has them."""

from __future__ import annotations

import numpy as np
import torch

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.lossless import LOSSLESS
from greenroom.moe.kernels import expert_products  # noqa: F401 - whose compiled products encode


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


def codes_of(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, exponents = LOSSLESS.encode(ExpertTensor("w", tuple(numbers.shape), torch.bfloat16), numbers).values()
    return codes, exponents


def lossless_record(numbers: ExpertWeights) -> ExpertWeights:
    return tuple(part for own in numbers for part in codes_of(own))


def swiglu_layer(hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> MoeLayer:
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    return MoeLayer("experts", 1, 1, tuple(ExpertTensor(name, shape, dtype) for name, shape in shapes.items()), True)
