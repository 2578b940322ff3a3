"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

A word of 32 bits in ``qweight`` ``[inputs / 8, outputs]`` has eight neighbouring inputs of an output, one in
``qzeros`` ``[groups, outputs / 8]`` the zero points of eight neighbouring outputs, the first one in the lowest bits.
``scales`` are ``[groups, outputs]``. ``g_idx`` ``[inputs]`` has the group of each input: with ``desc_act`` inputs were
quantised in the order of their activations, and so grouped. Version 1 stores each zero point less one.

Its numbers are those of GPTQModel's ``dequantize_weight`` to the bit if they are made in the scales' dtype, in which
that multiplies. In another dtype it rounds twice, and this once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.formats.expert_format import BadCodes
from greenroom.moe.formats.int4.matrix import (
    CODES_A_WORD,
    LARGEST,
    SCALES,
    Int4Matrix,
    check_groups,
    check_header,
    check_scales,
    groups_in,
    in_order,
    unpacked,
)
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int4.storage import Int4Storage
from greenroom.moe.formats.settings import group_size, names, need_4_bits, rules
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

_VERSIONS: Final = {"gptq": 1, "gptq_v2": 2}
_QZEROS, _SCALES, _G_IDX = 1, 2, 3


@dataclass(frozen=True)
class GptqStorage(Int4Storage):
    """``group_size``: -1 is all inputs. ``version``: 1 or 2. ``ordered``: with ``desc_act``."""

    group_size: int
    version: int
    ordered: bool

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        qweight = stored["qweight"]
        check_header(qweight, ("I32",))
        words, outputs = qweight.shape
        if outputs % CODES_A_WORD:
            raise CorruptCheckpoint(
                f"{qweight.name} in {qweight.shard} has {outputs} outputs, and words of zero points have "
                f"{CODES_A_WORD} each"
            )
        groups = groups_in(qweight, words * CODES_A_WORD, self.group_size)
        check_header(stored["scales"], tuple(SCALES), (groups, outputs))
        check_header(stored["qzeros"], ("I32",), (groups, outputs // CODES_A_WORD))
        check_header(stored["g_idx"], ("I32", "I64"), (words * CODES_A_WORD,))

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        _, qzeros, scales, g_idx = parts
        check_groups(g_idx, len(scales), _G_IDX)
        if self.version == 1 and bool((unpacked(qzeros) == LARGEST).any()):
            raise BadCodes(_QZEROS, f"has a zero point of {LARGEST + 1}, and codes end at {LARGEST}")
        check_scales(scales, dtype, _SCALES, lambda: self.numbers(parts, dtype))

    def matrix(self, parts: Sequence[torch.Tensor]) -> Int4Matrix:
        qweight, qzeros, scales, g_idx = parts
        return Int4Matrix(
            codes=unpacked(qweight.t()),
            scales=scales.t().contiguous(),
            zeros=(unpacked(qzeros) + (self.version == 1)).t().contiguous(),
            groups=None if in_order(g_idx, len(scales)) else g_idx.long(),
        )


def gptq(settings: Mapping[str, Any]) -> Shipped:
    """Raises NotServed for other bits, and for codes that were laid out for one product of matrices."""
    need_4_bits(settings.get("bits"))
    written = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if settings.get("is_marlin_format"):
        written = "marlin"
    if written not in _VERSIONS:
        raise NotServed(
            f"its codes are laid out for one product of matrices ({written}): what is served is the checkpoint as it "
            f"was before ({' or '.join(_VERSIONS)}), which GPTQModel saves"
        )
    storage = GptqStorage(group_size(settings), _VERSIONS[written], bool(settings.get("desc_act")))
    taken = [name for one in settings.get("modules_in_block_to_quantize") or () for name in names(one)]
    left_out = names(settings.get("modules_to_not_convert"))
    excluded = [re.compile(one[2:]) for one in rules(settings.get("dynamic")) if one.startswith("-:")]

    def leaves_out(module: str) -> bool:
        return (
            (bool(taken) and not any(module.endswith(f".{name}") for name in taken))
            or any(name in module for name in left_out)
            or any(rule.match(module) for rule in excluded)
        )

    return Int4(storage.group_size, zeros=True, ordered=storage.ordered).shipped(storage, "scales", leaves_out)
