"""Experts in every format that a record can have them in, and the numbers that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import ExpertFormat
from greenroom.moe.formats.gguf_storage import GGUF_PAIRS
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.mxfp4 import MXFP4
from tests.unit.kernels.grouped_weights import SAMPLES, grouped_weights, swiglu_layer
from tests.unit.kernels.lossless_weights import lossless_record, matrix
from tests.unit.kernels.mxfp4_weights import coded_expert

PAIR: Final = f"{Q4_K.name}-{Q6_K.name}"
STORED: Final = [
    MXFP4.name,
    LOSSLESS.name,
    *(name for name, (kept, _) in SAMPLES.items() if kept not in GGUF_PAIRS),
    PAIR,
]
"""Of those whose matrices differ one."""
TOP_K: Final = 4


def noise(seed: int, shape: tuple[int, ...], rare: int) -> torch.Tensor:
    """A matrix of bf16 of which about so many weights may have any exponent."""
    outputs, inputs = shape
    return matrix(seed, outputs, inputs, rare, finite=False)


def in_slots(expert_format: ExpertFormat, layer: MoeLayer, records: Sequence[ExpertWeights]) -> list[ExpertWeights]:
    """The records in slots of one arena, the last one first, with noise around them."""
    layout = expert_format.record(layer)
    stride = layout.nbytes + 4096
    memory = torch.randint(0, 256, (stride * len(records) + 4096,), dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :]
    placed = []
    for number, record in enumerate(reversed(records)):
        views = layout.views(memory[number * stride : number * stride + layout.nbytes])
        for view, part in zip(views, record, strict=True):
            view.copy_(part)
        placed.append(views)
    return placed[::-1]


def stored_experts(
    name: str, hidden: int, inner: int, dtype: torch.dtype, count: int
) -> tuple[ExpertFormat, MoeLayer, list[ExpertWeights]]:
    records: list[ExpertWeights]
    if name == MXFP4.name:
        hidden, inner = (-(-width // 32) * 32 for width in (hidden, inner))
        coded = [coded_expert(seed, hidden, inner, scales=(0, 120), dtype=dtype) for seed in range(count)]
        own: ExpertFormat = MXFP4
        layer, records = coded[0].layer, [one.record for one in coded]
    elif name == LOSSLESS.name:
        own, layer = LOSSLESS, swiglu_layer(hidden, inner, torch.bfloat16)
        records = [
            lossless_record(LOSSLESS, tuple(noise(seed, tensor.shape, rare=40) for tensor in layer.tensors))
            for seed in range(count)
        ]
    else:
        own, layer = SAMPLES[name][0], swiglu_layer(hidden, inner, dtype)
        records = [grouped_weights(name, seed, hidden, inner).record for seed in range(count)]
    layer = replace(layer, top_k=TOP_K)
    return own, layer, in_slots(own, layer, records)


def expanded(expert_format: ExpertFormat, layer: MoeLayer, record: ExpertWeights) -> ExpertWeights:
    into = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
    expert_format.expand(layer, record, into)
    return into


def same_bits(ours: ExpertWeights, theirs: ExpertWeights) -> bool:
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(ours, theirs, strict=True))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
