"""Random SwiGLU experts in the formats whose codes share scales: as they are stored, as records, and expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.fp4 import FP4
from greenroom.moe.formats.fp8 import BLOCK, FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.gguf_storage import GGUF_PAIRS
from greenroom.moe.formats.grouped_format import GroupedFormat, is_joined
from greenroom.moe.formats.int4.matrix import MIDDLE
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int8 import INT8
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.native.rows import GroupedExpert

Sample = Callable[[ExpertTensor, torch.Generator, bool], tuple[torch.Tensor, ...]]
"""Of ``(tensor, generator, whole)`` what is stored of it. ``whole``: codes are integers up to 4, scales
powers of two."""


@dataclass(frozen=True)
class GroupedWeights:
    """``stored``: of each matrix. ``expanded``: in float32."""

    layer: MoeLayer
    expert: GroupedExpert
    stored: tuple[tuple[torch.Tensor, ...], ...]
    record: ExpertWeights
    expanded: ExpertWeights


def swiglu_layer(hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> MoeLayer:
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    return MoeLayer("experts", 1, 1, tuple(ExpertTensor(name, shape, dtype) for name, shape in shapes.items()), True)


def _scales(shape: tuple[int, int], generator: torch.Generator, whole: bool) -> torch.Tensor:
    if whole:
        return torch.exp2(torch.randint(-1, 2, shape, generator=generator).float())
    return torch.rand(shape, generator=generator) + 0.5


def _int8(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    most = 4 if whole else 127
    codes = torch.randint(-most - 1 + whole, most + 1, (outputs, inputs), generator=generator).to(torch.int8)
    scales = _scales((outputs, -(-inputs // 32)), generator, whole) * (1.0 if whole else 0.004)
    return codes.view(torch.uint8), scales.half()


def _fp4(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    integers = torch.tensor([0, 2, 4, 5, 6, 8, 10, 12, 13, 14], dtype=torch.uint8)
    drawn = torch.randint(0, len(integers) if whole else 16, (outputs, inputs), generator=generator)
    low, high = (126, 129) if whole else (117, 121)
    scales = torch.randint(low, high, (outputs, -(-inputs // 32)), generator=generator)
    return integers[drawn] if whole else drawn.to(torch.uint8), scales.to(torch.uint8)


def _fp8_codes(outputs: int, inputs: int, generator: torch.Generator, whole: bool) -> torch.Tensor:
    if whole:
        numbers = torch.randint(-4, 5, (outputs, inputs), generator=generator).float()
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return codes.masked_fill_(codes & 0x7F == 0x7F, 0x7E)


def _fp8_blocks(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    matrices = 2 if is_joined(tensor) else 1
    rows = []
    for _ in range(matrices):
        own = _scales((-(-outputs // matrices // BLOCK), -(-inputs // BLOCK)), generator, whole)
        rows.append(own.repeat_interleave(BLOCK, dim=0)[: outputs // matrices] * (1.0 if whole else 0.004))
    return _fp8_codes(outputs, inputs, generator, whole), torch.cat(rows)


def _fp8_rows(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    scales = _scales((outputs, 1), generator, whole) * (1.0 if whole else 0.004)
    return _fp8_codes(outputs, inputs, generator, whole), scales


def _q4_k(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    blocks = -(-inputs // 256)

    def small(most: int, width: int) -> torch.Tensor:
        return torch.randint(0, most + 1, (outputs, width), generator=generator).to(torch.uint8)

    if whole:
        one = torch.ones(outputs, blocks).half()
        return small(8, inputs), one, 1 << small(1, 8 * blocks), one.clone(), small(8, 8 * blocks)
    factors = (torch.rand((2, outputs, blocks), generator=generator) * 0.004).half()
    return small(15, inputs), factors[0], small(63, 8 * blocks), factors[1] * 8, small(63, 8 * blocks)


def _q6_k(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    blocks = -(-inputs // 256)
    low, high = (28, 37) if whole else (0, 64)
    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.uint8)
    if whole:
        scales = 1 << torch.randint(0, 2, (outputs, 16 * blocks), generator=generator).to(torch.int8)
        return codes, torch.ones(outputs, blocks).half(), scales
    scales = torch.randint(-128, 128, (outputs, 16 * blocks), generator=generator).to(torch.int8)
    return codes, (torch.rand((outputs, blocks), generator=generator) * 0.0004).half(), scales


def _int4(kept: Int4) -> Sample:
    def sample(tensor: ExpertTensor, generator: torch.Generator, whole: bool) -> tuple[torch.Tensor, ...]:
        outputs, inputs = tensor.shape
        groups = 1 if kept.group_size == -1 else -(-inputs // kept.group_size)
        codes = torch.randint(4 if whole else 0, 13 if whole else 16, (outputs, inputs), generator=generator)
        scales = _scales((outputs, groups), generator, whole) * (1.0 if whole else 0.02)
        made = [codes.to(torch.uint8), scales.to(getattr(torch, kept.scales))]
        if kept.zeros:
            zeros = torch.randint(7 if whole else 0, 10 if whole else 16, (outputs, groups), generator=generator)
            made.append(zeros.to(torch.uint8))
        if kept.ordered:
            order = torch.randperm(inputs, generator=generator).to(torch.int32)
            made.append(order.repeat(2 if is_joined(tensor) else 1))
        return tuple(made)

    return sample


def _let_gates_pass(kept: GroupedFormat, stored: tuple[torch.Tensor, ...], inner: int) -> None:
    """Every gate is 128 for rows whose first number is 32: silu leaves it as it is."""
    codes, scales, *others = stored
    scales[:inner] = 127 if kept.name.startswith(FP4.name) else 1
    if not isinstance(kept, Int4):
        zero, four = _ZERO_AND_FOUR.get(kept.name.split("-")[0], (0, 0x48))
        codes[:inner] = zero
        codes[:inner, 0] = four
        for part in others:
            part[:inner] = 1
        if len(others) == 3:
            others[2][:inner] = 0  # minimums
        return
    if kept.zeros:
        others[0][:inner] = MIDDLE
    codes[:inner] = MIDDLE
    first = int((others[-1][: codes.shape[1]] == 0).nonzero()) if kept.ordered else 0
    codes[:inner, first] = MIDDLE + 4


INT4: Final = {
    "int4": Int4(32),
    "int4-zeros": Int4(64, zeros=True),
    "int4-bfloats": Int4(-1, scales="bfloat16"),
    "int4-bfloats-zeros": Int4(32, zeros=True, scales="bfloat16"),
    "int4-ordered": Int4(32, zeros=True, ordered=True),
    "int4-bfloats-ordered": Int4(96, ordered=True, scales="bfloat16"),
}

_ALONE: Final[dict[str, tuple[GroupedFormat, Sample]]] = {
    INT8.name: (INT8, _int8),
    FP4.name: (FP4, _fp4),
    FP8_BLOCKS.name: (FP8_BLOCKS, _fp8_blocks),
    FP8_ROWS.name: (FP8_ROWS, _fp8_rows),
    Q4_K.name: (Q4_K, _q4_k),
    Q6_K.name: (Q6_K, _q6_k),
}


def _pair(first: Sample, second: Sample) -> Sample:
    return lambda tensor, *more: (first if is_joined(tensor) else second)(tensor, *more)


SAMPLES: Final[dict[str, tuple[GroupedFormat, Sample]]] = {
    **_ALONE,
    **{name: (kept, _int4(kept)) for name, kept in INT4.items()},
    **{pair.name: (pair, _pair(*(_ALONE[one][1] for one in pair.name.split("-")))) for pair in GGUF_PAIRS},
}

_ZERO_AND_FOUR: Final = {INT8.name: (0, 4), FP4.name: (0, 6), Q4_K.name: (0, 4), Q6_K.name: (32, 36)}
"""The codes of these numbers; those of the others are E4M3's."""


def grouped_weights(name: str, seed: int, hidden: int, inner: int, *, whole: bool = False) -> GroupedWeights:
    kept, sample = SAMPLES[name]
    generator, layer = torch.Generator().manual_seed(seed), swiglu_layer(hidden, inner)
    stored = tuple(sample(tensor, generator, whole) for tensor in layer.tensors)
    if whole:
        _let_gates_pass(kept, stored[0], inner)
    by_name: dict[str, torch.Tensor] = {}
    for tensor, parts in zip(layer.tensors, stored, strict=True):
        by_name |= kept.make(tensor, parts)
    layout = kept.record(layer)
    record = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    for spec, view in zip(layout.tensors, record, strict=True):
        view.copy_(by_name[spec.name])
    expanded = tuple(torch.empty(tensor.shape) for tensor in layer.tensors)
    kept.expand(layer, record, expanded)
    return GroupedWeights(layer, GroupedExpert(*kept.products, inner), stored, record, expanded)
