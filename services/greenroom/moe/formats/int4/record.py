"""Records in codes of 4 bits: a scale of 16 bits for each group of inputs, zero points, and an order of the inputs.

Beside what ``panels.py`` says a record has for a matrix

- ``codes``: each less 8, in two's complement, as ``bit_codes`` lays them out.
- ``zeros[panels, groups, 16]``, if they differ: each less 8 as well. A byte has that of an output of the left half in
  its low half, and that of the same one of the right half above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn import functional

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import UnsupportedModel
from greenroom.moe.formats.byte_moves import transposed
from greenroom.moe.formats.grouped_format import MatrixFormat, Part
from greenroom.moe.formats.int4.matrix import MIDDLE, SCALES, Int4Matrix
from greenroom.moe.formats.panels import HALF, PANEL, UNIT, bit_codes, halves_of_bits, halves_of_lanes, lane_values
from greenroom.moe.formats.stored_matrix import MatrixStorage, Shipped
from greenroom.moe.native.rows import GroupedCodes

_BITS: Final = 4
_DECODERS: Final = {"float16": "int4_halfs", "bfloat16": "int4_bfloats"}


@dataclass(frozen=True)
class Int4(MatrixFormat):
    """``stored``: codes, scales, zero points where there are ``zeros`` (else all are 8), and where inputs are
    ``ordered`` their order, group after group; of gates and ups that are joined one behind the other.

    ``group_size``: inputs that share a scale, whole units of 32; -1: all of them. ``scales``: their dtype.
    """

    group_size: int
    zeros: bool = False
    ordered: bool = False
    scales: str = "float16"

    name = "int4"
    version = 1

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        decoder = _DECODERS[self.scales] + ("_zeros" if self.zeros else "")
        own = GroupedCodes(decoder, max(0, self.group_size), self.ordered)
        return own, own

    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        codes = ("codes", (panels, units, UNIT * PANEL * _BITS // 8), "uint8")
        scales = ("scales", (panels, groups, PANEL), self.scales)
        zeros = (("zeros", (panels, groups, HALF), "uint8"),) if self.zeros else ()
        return codes, scales, *zeros

    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        codes, scales, *others = stored
        made = [bit_codes(codes ^ MIDDLE, _BITS, joined=joined), lane_values(scales, joined=joined)]
        if self.zeros:
            lanes = lane_values(others.pop(0) ^ MIDDLE, joined=joined)
            made.append(lanes[..., :HALF] | lanes[..., HALF:] << _BITS)
        return *made, *(_one_order(order, joined=joined) for order in others)

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales, *zeros = parts
        panels, units, _ = codes.shape
        groups, width = scales.shape[1], units * UNIT
        size = width if self.group_size == -1 else self.group_size
        all_codes = _signed(halves_of_bits(codes, _BITS)).float()
        numbers = functional.pad(all_codes, (0, groups * size - width)).view(panels, 2, HALF, groups, size)
        if zeros:
            both = torch.stack([zeros[0] & 15, zeros[0] >> _BITS], dim=1)  # [panels, 2, groups, 16]
            numbers -= _signed(both).float().transpose(2, 3)[..., None]
        by_group = halves_of_lanes(scales).float()
        return (numbers * by_group[..., None]).view(panels, 2, HALF, groups * size)[..., :width]

    def shipped(self, storage: MatrixStorage, scale: str, leaves_out: Callable[[str], bool]) -> Shipped:
        """Of a checkpoint that stores matrices so. ``scale``: which of the parts has scales."""

        def of_dense(stored: Mapping[str, StoredTensor]) -> Int4 | None:
            kept = str(SCALES[stored[scale].dtype]).removeprefix("torch.")
            whole = self.group_size == -1 or self.group_size % UNIT == 0
            return replace(self, scales=kept) if whole and kept in _DECODERS else None

        def of(tensors: Mapping[str, StoredTensor]) -> Shipped:
            found = Shipped(self, storage, leaves_out, dense_format_of=of_dense)
            if self.group_size % UNIT and self.group_size != -1:
                return found.only_expanded(f"its groups of {self.group_size} inputs are no whole units of {UNIT}")
            experts = [tensor for name, tensor in tensors.items() if ".experts." in name]
            if plain := [one.name for one in experts if one.name.endswith(".weight")]:
                return found.only_expanded(f"{plain[0]} is stored as numbers, and others are not")
            dtypes = {one.dtype for one in experts if one.name.endswith(f".{scale}")} & SCALES.keys()
            kept = {str(SCALES[dtype]).removeprefix("torch.") for dtype in dtypes}
            if len(kept) > 1 or not kept <= _DECODERS.keys():
                return found.only_expanded(f"its scales are {' and '.join(sorted(kept))}")
            return replace(found, format=replace(self, scales=kept.pop())) if kept else found

        return replace(of({}), of_tensors=of)


def codes_of(matrix: Int4Matrix, *, ordered: bool) -> list[torch.Tensor]:
    """What ``Int4`` makes a record of. Raises UnsupportedModel for an order where the record has none."""
    codes, scales, zeros, groups = matrix
    # Zeros are what is tried before anything is read. Of a checkpoint ``check`` has refused them.
    if groups is not None and not ordered and bool(groups.any()):
        raise UnsupportedModel(
            "a matrix's inputs are in an order, and by quantization_config there is none: use --experts-as expanded "
            "and --dense-as expanded"
        )
    order = torch.arange(codes.shape[1]) if groups is None else torch.argsort(groups, stable=True)
    return [
        codes if groups is None else transposed(transposed(codes[None])[0].index_select(0, order)[None])[0],
        scales,
        *([] if zeros is None else [zeros]),
        *([order.to(torch.int32)] if ordered else []),
    ]


def _one_order(orders: torch.Tensor, *, joined: bool) -> torch.Tensor:
    """Of ``int32[inputs]``, or where gates and ups are ``joined`` of both ``int32[2 * inputs]``: that of the record.
    Raises UnsupportedModel if they differ."""
    if not joined:
        return orders
    gates, ups = orders.chunk(2)
    if not torch.equal(gates, ups):
        raise UnsupportedModel(
            "an expert's gate and up have their inputs in orders of their own, and a record has one for both: use "
            "--experts-as expanded"
        )
    return gates


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Of two's complement in 4 bits."""
    return (codes ^ MIDDLE).view(torch.int8) - MIDDLE
