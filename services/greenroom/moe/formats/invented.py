"""Experts that are made up, to try and to time what computes with records."""

from __future__ import annotations

from typing import Final

import torch

from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import EncodesNumbers, ExpertFormat

_SPREAD: Final = 0.02
"""Of random weights: about what trained ones have."""


def invented_record(expert_format: ExpertFormat, layer: MoeLayer) -> torch.Tensor:
    """The bytes of a record of the layer with random weights, in RAM: always the same ones. All numbers are finite."""
    generator = torch.Generator().manual_seed(0)
    layout = expert_format.record(layer)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    parts = layout.views(record)
    if isinstance(expert_format, EncodesNumbers):  # not any bytes are codes
        left = iter(parts)
        for tensor in layer.tensors:
            numbers = torch.empty(tensor.shape, dtype=tensor.dtype).normal_(0.0, _SPREAD, generator=generator)
            for made in expert_format.encode(tensor, numbers).values():
                next(left).copy_(made)
        return record
    for part in parts:
        if part.is_floating_point():
            part.normal_(0.0, _SPREAD, generator=generator)
        elif part.dtype is torch.int32:  # an order of inputs
            torch.arange(part.numel(), out=part.view(-1))
        else:
            # As codes anything but NaN, as scales nothing large, as halves of numbers of half precision no infinity.
            part.random_(96, 120, generator=generator)
    return record
