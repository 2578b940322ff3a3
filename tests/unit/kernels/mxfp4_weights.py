"""Random experts in MXFP4: as a checkpoint has them, as a record has them, and expanded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.mxfp4 import MXFP4


@dataclass(frozen=True)
class CodedExpert:
    """``stored``: of each matrix, its blocks and scales."""

    layer: MoeLayer
    stored: dict[str, tuple[torch.Tensor, torch.Tensor]]
    record: ExpertWeights
    expanded: ExpertWeights


def layer_of(hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> MoeLayer:
    shapes = {
        "gate_up_proj": (hidden, 2 * inner), "gate_up_proj_bias": (2 * inner,),
        "down_proj": (inner, hidden), "down_proj_bias": (hidden,),
    }  # fmt: skip
    return MoeLayer("experts", 1, 1, tuple(ExpertTensor(name, shape, dtype) for name, shape in shapes.items()), True)


def coded_expert(
    seed: int, hidden: int, inner: int, scales: tuple[int, int] = (118, 126), dtype: torch.dtype = torch.bfloat16
) -> CodedExpert:
    """``scales``: from the first to the last one."""
    generator = torch.Generator().manual_seed(seed)
    layer = layer_of(hidden, inner, dtype)
    stored, by_name = {}, {}
    for tensor in layer.tensors:
        if len(tensor.shape) == 1:
            by_name[tensor.name] = torch.randn(tensor.shape, generator=generator).to(dtype)
            continue
        shapes = MXFP4.stored_shapes(tensor)
        blocks = torch.randint(0, 256, shapes[0], dtype=torch.uint8, generator=generator)
        own = torch.randint(scales[0], scales[1] + 1, shapes[1], dtype=torch.uint8, generator=generator)
        stored[tensor.name] = blocks, own
        by_name |= MXFP4.make(tensor, stored[tensor.name])
    layout = MXFP4.record(layer)
    record = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    for spec, view in zip(layout.tensors, record, strict=True):
        view.copy_(by_name[spec.name])
    expanded = tuple(torch.empty(tensor.shape, dtype=dtype) for tensor in layer.tensors)
    MXFP4.expand(layer, record, expanded)
    return CodedExpert(layer, stored, record, expanded)
