"""AWQ's layout that AutoAWQ calls GEMM.

A word of 32 bits in ``qweight`` ``[inputs, outputs / 8]`` and in ``qzeros`` ``[groups, outputs / 8]`` has eight
neighbouring outputs: from the lowest bits on the 1st, 3rd, 5th, 7th, 2nd, 4th, 6th and 8th. ``scales`` are
``[groups, outputs]``.

Its numbers are those of AutoAWQ's ``dequantize_gemm`` to the bit if they are made in the scales' dtype, in which that
multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.moe.formats.byte_moves import transposed
from greenroom.moe.formats.int4.matrix import (
    CODES_A_WORD,
    SCALES,
    Int4Matrix,
    check_header,
    check_scales,
    groups_in,
    unpacked,
)
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int4.storage import Int4Storage
from greenroom.moe.formats.settings import group_size, names, need_4_bits
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

_SCALES: Final = 2
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its outputs is."""


@dataclass(frozen=True)
class AwqStorage(Int4Storage):
    """``group_size``: -1 is all inputs."""

    group_size: int

    parts = ("qweight", "qzeros", "scales")
    ordered = False

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        qweight = stored["qweight"]
        check_header(qweight, ("I32",))
        inputs, words = qweight.shape
        groups = groups_in(qweight, inputs, self.group_size)
        check_header(stored["scales"], tuple(SCALES), (groups, words * CODES_A_WORD))
        check_header(stored["qzeros"], ("I32",), (groups, words))

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        check_scales(parts[_SCALES], dtype, _SCALES, lambda: self.numbers(parts, dtype))

    def matrix(self, parts: Sequence[torch.Tensor]) -> Int4Matrix:
        qweight, qzeros, scales = parts
        return Int4Matrix(_by_output(qweight), scales.t().contiguous(), _by_output(qzeros))


def _by_output(words: torch.Tensor) -> torch.Tensor:
    """``int32[inputs, outputs / 8]`` as ``uint8[outputs, inputs]``; so are groups in the place of inputs."""
    inputs, count = words.shape
    in_words = transposed(unpacked(words)[None]).view(count, CODES_A_WORD, inputs)
    return torch.stack([in_words[:, place] for place in _PLACES], dim=1).view(-1, inputs)


def awq(settings: Mapping[str, Any]) -> Shipped:
    """Raises NotServed for other bits, and for the layouts of other products of matrices."""
    need_4_bits(settings.get("bits"))
    written = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if settings.get("backend") == "llm-awq":
        written = "llm-awq"
    if written != "gemm":
        raise NotServed(
            f"its codes are laid out for another product of matrices ({written}): what is served is the version gemm, "
            "which AutoAWQ saves"
        )
    left_out = names(settings.get("modules_to_not_convert"))
    storage = AwqStorage(group_size(settings))
    return Int4(storage.group_size, zeros=True).shipped(
        storage, "scales", lambda module: any(name in module for name in left_out)
    )
