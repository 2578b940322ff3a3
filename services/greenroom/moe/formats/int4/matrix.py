"""A matrix in codes of 4 bits that share scales: what the checkpoints of GPTQ, AWQ and compressed-tensors mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.formats.byte_moves import fields
from greenroom.moe.formats.expert_format import BadCodes

LARGEST: Final = 15
MIDDLE: Final = 8
"""The zero point of symmetric codes."""

CODES_A_WORD: Final = 8
"""Of 32 bits."""

SCALES: Final = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""What scales may be stored as."""

_AT_ONCE: Final = 1 << 20
"""Weights that become numbers at a time: few enough that what they take meanwhile stays in the processor's cache."""


class Int4Matrix(NamedTuple):
    """``codes``: uint8 ``[outputs, inputs]``, 15 at most. ``scales``: floats ``[outputs, groups]``. ``zeros``: uint8
    ``[outputs, groups]``, 15 at most; None: 8 everywhere. ``groups``: int64 ``[inputs]``, the group of each input, all
    groups being of one size; None: neighbours, in order.

    A weight is ``scale * (code - zero point)``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """``[outputs, inputs]``. Multiplied in float32, which has all products of scales of 16 bits, then rounded."""
        outputs, inputs = self.codes.shape
        made = torch.empty(outputs, inputs, dtype=dtype)
        step = max(1, _AT_ONCE // inputs)
        for first in range(0, outputs, step):
            some = slice(first, first + step)
            scales = self.scales[some].float()
            zeros = torch.full_like(scales, MIDDLE) if self.zeros is None else self.zeros[some].float()
            codes = self.codes[some].float()
            if self.groups is None:
                by_group = codes.view(*scales.shape, -1)
                made[some] = by_group.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).view(-1, inputs)
            else:
                made[some] = codes.sub_(zeros[:, self.groups]).mul_(scales[:, self.groups])
        return made


def check_scales(scales: torch.Tensor, dtype: torch.dtype, part: int, numbers: Callable[[], torch.Tensor]) -> None:
    """Raises BadCodes of this part if one is no number, or makes weights that ``dtype`` lacks. ``numbers()``: all
    weights, which are looked at only under absurd scales."""
    if not bool(scales.isfinite().all()):
        raise BadCodes(part, "has a scale that is no finite number")
    most = float(scales.abs().max())
    if most * LARGEST > torch.finfo(dtype).max and not bool(numbers().isfinite().all()):
        raise BadCodes(part, f"has a scale of {most:.4g}, whose weights {dtype} lacks")


def check_header(stored: StoredTensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises CorruptCheckpoint, with file and tensor, unless it has one of the dtypes, and of the shapes (none: any of
    two dimensions)."""
    if stored.dtype in dtypes and (stored.shape in shapes if shapes else len(stored.shape) == 2):
        return
    expected = " or ".join(map(str, shapes)) if shapes else "two dimensions"
    raise CorruptCheckpoint(
        f"{stored.name} in {stored.shard} has the shape {stored.shape} of {stored.dtype}, and by quantization_config "
        f"and the tensors beside it {expected} of {' or '.join(dtypes)}"
    )


def groups_in(codes: StoredTensor, inputs: int, group_size: int) -> int:
    """How many groups there are. -1: all inputs are one. Raises CorruptCheckpoint if the size does not divide them."""
    if group_size == -1:
        return 1
    if inputs % group_size:
        raise CorruptCheckpoint(
            f"{codes.name} in {codes.shard} has {inputs} inputs, which are no whole groups of {group_size}"
        )
    return inputs // group_size


def check_groups(groups: torch.Tensor, count: int, part: int) -> None:
    """Raises BadCodes of this part unless the inputs fall into ``count`` groups of one size."""
    size = len(groups) // count
    outside = groups[(groups < 0) | (groups >= count)]
    if len(outside):
        raise BadCodes(part, f"puts an input into group {int(outside[0])}, and there are {count}")
    sizes = torch.bincount(groups.long(), minlength=count)
    if bool((sizes != size).any()):
        odd = int((sizes != size).nonzero()[0])
        raise BadCodes(
            part, f"is no order of the inputs: it puts {int(sizes[odd])} into group {odd}, and each has {size}"
        )


def in_order(groups: torch.Tensor, count: int) -> bool:
    """Whether the groups are of neighbours, in order."""
    return bool((groups == torch.arange(len(groups)) // max(1, len(groups) // count)).all())


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Of int32 ``[rows, n]`` the eight codes of each word from the lowest bits on: uint8 ``[rows, 8 * n]``."""
    return fields(words.contiguous().view(torch.uint8), 1, 4).view(len(words), -1)
