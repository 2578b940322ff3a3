"""How a GGUF file stores a matrix of experts, and the formats of records for it.

All experts of a layer are one tensor, and one expert is a run of blocks in it. The first matrix of an expert (gate and
up) and the second one may be of different types, and so may layers: a Q4_K_M file has part of its second ones in Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import torch

from greenroom.checkpoints.gguf_blocks import (
    Fields,
    NotFinite,
    mxfp4_codes,
    numbers_of,
    q4_k_codes,
    q6_k_codes,
    q8_0_codes,
)
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.gguf.block_types import BlockType
from greenroom.moe.formats.byte_moves import fields
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, BadCodes, ExpertFormat, of_layers
from greenroom.moe.formats.fp4 import FP4
from greenroom.moe.formats.grouped_format import GroupedPair, MatrixFormat
from greenroom.moe.formats.int8 import INT8
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.formats.mxfp4 import MXFP4


@dataclass(frozen=True, slots=True)
class _Type:
    """Of blocks ``uint8[blocks, bytes]``, ``split``: what the ``record``'s format takes. ``finite``: whether all their
    numbers are surely some that bfloat16 and float32 have."""

    record: MatrixFormat
    split: Callable[[torch.Tensor, Fields], Sequence[torch.Tensor]]
    finite: Callable[[torch.Tensor], bool]


def _halves(*places: int) -> Callable[[torch.Tensor], bool]:
    """All numbers are products of factors of half precision, which lie at these bytes, and small integers."""
    return lambda blocks: all(
        bool(torch.isfinite(blocks[:, place : place + 2].view(torch.float16)).all()) for place in places
    )


_SAFE_EXPONENT: Final = 252
"""Of E8M0: with it bfloat16 has all of E2M1's numbers, with the next one all but the largest."""


_TYPES: Final[Mapping[str, _Type]] = {
    "Q8_0": _Type(INT8, q8_0_codes, _halves(0)),
    "Q4_K": _Type(Q4_K, q4_k_codes, _halves(0, 2)),
    "Q6_K": _Type(Q6_K, q6_k_codes, _halves(208)),
    "MXFP4": _Type(FP4, mxfp4_codes, lambda blocks: int(blocks[:, 0].max()) <= _SAFE_EXPONENT),
}

GGUF_PAIRS: Final = tuple(GroupedPair(*pair) for pair in permutations((one.record for one in _TYPES.values()), 2))

_AT_ONCE: Final = 1 << 20
"""Weights that are taken apart at a time."""

_BY_TYPES: Final[dict[tuple[str, str], ExpertFormat]] = {
    (first, second): own.record if first == second else next(
        pair for pair in GGUF_PAIRS if pair.name == f"{own.record.name}-{other.record.name}"
    )
    for first, own in _TYPES.items() for second, other in _TYPES.items()
}  # fmt: skip
"""By the types of gate and up, and of down."""


class GgufMatrices:
    """A ``MatrixStorage``: a tensor of blocks is a matrix, of one expert or of all of them."""

    parts: tuple[str, ...] = ("",)

    def __init__(self, block: BlockType) -> None:
        self._block = block
        self._type = _TYPES[block.name]

    def is_part(self, tensor: StoredTensor) -> bool:
        return tensor.block == self._block

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        """Done when the file was read."""
        return

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        if dtype is torch.float16 or not self._type.finite(self._blocks(parts)):
            _check_numbers(self, parts, dtype)

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows, blocks, at = parts[0].shape[-2], len(self._blocks(parts)), 0
        made: list[torch.Tensor] = []
        for split in self._splits(parts):
            made = made or [part.new_empty(blocks, part.shape[1]) for part in split]
            for into, part in zip(made, split, strict=True):
                into[at : at + len(part)] = part
            at += len(split[0])
        return [
            part.view(rows, -1).view(torch.uint8 if number == 0 else part.dtype) for number, part in enumerate(made)
        ]

    def _splits(self, parts: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """Some blocks at a time: few enough that what they take meanwhile is little."""
        for blocks in torch.split(self._blocks(parts), max(1, _AT_ONCE // self._block.numbers)):
            yield self._type.split(blocks, fields)

    def numbers(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (one,) = parts
        made = numbers_of(one.contiguous().view(-1), self._block, dtype)
        return made.view(*one.shape[:-1], one.shape[-1] // self._block.nbytes * self._block.numbers)

    def _blocks(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """``uint8[blocks, bytes of a block]``, row after row."""
        return parts[0].contiguous().view(-1, self._block.nbytes)


class GgufMxfp4(GgufMatrices):
    """gpt-oss's in MXFP4: blocks of 17 bytes, a scale and 16 pairs of codes. ``codes`` gives them as its own
    checkpoints have them, blocks ``[outputs, inputs / 32, 16]`` and scales ``[outputs, inputs / 32]``.

    A pair is an input of a block's first half and one of its second half; in those checkpoints it is two neighbours.
    """

    def __init__(self, block: BlockType) -> None:
        self._block = block

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        _check_numbers(self, parts, dtype)

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        blocks = self._blocks(parts)
        in_order, _ = mxfp4_codes(blocks, fields)
        pairs = in_order[:, 0::2] | in_order[:, 1::2] << 4
        rows = parts[0].shape[-2]
        return [pairs.view(rows, -1, pairs.shape[1]), blocks[:, 0].reshape(rows, -1)]

    def joined(self, codes: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Outputs of gate and up in turns; those of a single matrix as they are."""
        return [torch.stack(list(parts), dim=1).flatten(0, 1) for parts in zip(*codes, strict=True)]


def _check_numbers(storage: GgufMatrices, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    try:
        storage.numbers(parts, dtype)
    except NotFinite as error:
        raise BadCodes(0, str(error)) from error


def matrix_format_of(block: BlockType) -> MatrixFormat | None:
    """What a matrix of these blocks may stay as, which belongs to no expert. None: as numbers."""
    found = _TYPES.get(block.name)
    return None if found is None else found.record


def storage_of(block: BlockType, kept: ExpertFormat) -> GgufMatrices:
    """How a matrix of these blocks is stored, whose records are ``kept`` as codes."""
    return GgufMxfp4(block) if kept is MXFP4 else GgufMatrices(block)


def gguf_format(types: Mapping[str, tuple[str, str, str]], *, clamped: bool = False) -> ExpertFormat:
    """``types``: of each layer's gate, up and down. A layer whose types have no records of their own has numbers.
    ``clamped``: experts are gpt-oss's."""
    known = {("MXFP4", "MXFP4"): MXFP4} if clamped else _BY_TYPES
    by_layer = {
        layer: known.get((gate, down), PLAIN_FORMAT) if gate == up else PLAIN_FORMAT
        for layer, (gate, up, down) in types.items()
    }
    return of_layers(by_layer)
