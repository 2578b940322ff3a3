"""bf16 in three quarters of its bytes without losing a bit: a byte of sign and mantissa, half a byte of exponent.

The exponents of a trained matrix are few: its 15 commonest are those of all but one weight in thousands. So a weight
has its exponent's place in a table of these. The last place stands for all others, which are listed beside.

A record has two tensors of each matrix ``[outputs, inputs]``, laid out for the compiled products
(``native/lossless_products.inc``):

- ``codes[outputs, inputs * 3 / 2]``: of each row first a byte a weight, its sign and mantissa, then half a byte a
  weight, its exponent's place. Of every 64 weights, which are eight groups of eight, the groups 0 and 4 lie side by
  side, then 1 and 5, 2 and 6, 3 and 7; a byte of places has one of the first 32 as they lie in its low half, and one of
  the last 32 in its high half. What is left of a row lies in order, the first of two in the low half.
- ``exponents[lines, 64]``: 16 bytes of table, the last one 0. Then 32-bit numbers, little-endian: for each *strip* of
  eight rows where its list ends, and the lists. An entry has a weight's column in its lowest 16 bits, its row in the
  strip in the next 8, and its exponent.

Each record of a layer has room for the same number of entries. Those that are left over repeat the matrix's first
weight, so a device need not ask how many there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import DoesNotFit

PLACES: Final = 16
"""Of the table. The last one stands for exponents that it lacks."""
LISTED: Final = PLACES - 1

_BLOCK, _STRIP = 64, 8
_LINE = 64  # bytes
_COLUMNS = 1 << 16  # that an entry can name

_ONE_OF: Final = 512
"""There is room for one listed weight of so many, which is 0.4 % of bf16's bytes."""
_LEAST_ROOM: Final = 64

_AT_ONCE: Final = 1 << 18
"""Weights that are worked on at a time: few enough that they stay in the processor's cache."""

_EXPANDING_BYTES, _LISTING_BYTES = 24, 64
"""What torch takes to expand: of a weight meanwhile, of some at a time; and of an entry."""


class Coder(Protocol):
    """What codes a matrix on a CPU; see ``NativeRows``."""

    def lossless_encode(
        self, numbers: torch.Tensor, room: int, codes: torch.Tensor, exponents: torch.Tensor
    ) -> int: ...

    def lossless_numbers(self, codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor) -> None: ...


class Lossless:
    """Of experts that are two matrices of bf16, each with an even number of inputs.

    ``coder``: the compiled one, which ``kernels/expert_products.py`` sets, as it knows the formats. It raises a
    GreenroomError where nothing was compiled. Then nothing can be encoded, and torch decodes.
    """

    coder: Callable[[], Coder] | None = None

    name = "lossless"
    version = 1

    def record(self, layer: MoeLayer) -> RecordLayout:
        """Raises InvalidConfig for experts of any other kind."""
        if not layer.stacked or [len(tensor.shape) for tensor in layer.tensors] != [2, 2]:
            raise _refused(f"{layer.name} has other experts than two matrices without biases")
        return RecordLayout.of(part for tensor in layer.tensors for part in _parts_of(tensor))

    def stored_shapes(self, tensor: ExpertTensor) -> tuple[tuple[int, ...], ...]:
        return ()

    def check(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> None:
        pass

    def make(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        raise TypeError(f"{tensor.name} is stored as numbers")

    def encode(self, tensor: ExpertTensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        if numbers.shape != tensor.shape or numbers.dtype is not torch.bfloat16:
            raise ValueError(f"{tensor.name} has {numbers.dtype} {tuple(numbers.shape)}, not bfloat16 {tensor.shape}")
        outputs, inputs = tensor.shape
        codes = torch.empty(outputs, inputs // 2 * 3, dtype=torch.uint8)
        exponents = torch.zeros(lines(outputs, inputs), _LINE, dtype=torch.uint8)
        there = room(outputs, inputs)
        assert self.coder is not None, "expert_products was not imported"
        rare = self.coder().lossless_encode(numbers.contiguous(), there, codes, exponents)
        if rare > there:
            raise DoesNotFit(
                f"{rare} weights have other exponents than the 15 commonest, and there is room for {there}"
            )
        return {f"{tensor.name}_codes": codes, f"{tensor.name}_exponents": exponents}

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        left, coder = iter(weights), self._coder_of(into[0].device)
        for target in into:
            codes, exponents = next(left), next(left)
            if coder is not None:
                coder.lossless_numbers(codes, exponents, target)
            else:
                expand_by_torch(codes, exponents, target)

    def _coder_of(self, device: torch.device) -> Coder | None:
        if device.type != "cpu" or self.coder is None:
            return None
        with contextlib.suppress(GreenroomError):
            return self.coder()
        return None

    def expanding_bytes(self, layer: MoeLayer) -> int:
        widest = max(tensor.shape[1] for tensor in layer.tensors)
        listed = max(room(*tensor.shape) for tensor in layer.tensors)
        return max(_AT_ONCE, widest) * _EXPANDING_BYTES + listed * _LISTING_BYTES


LOSSLESS: Final = Lossless()


def room(outputs: int, inputs: int) -> int:
    """How many weights of a matrix may have another exponent than its 15 commonest."""
    return max(_LEAST_ROOM, outputs * inputs // _ONE_OF)


def expand_by_torch(codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor) -> None:
    """Write a matrix's numbers into ``into[outputs, inputs]``, on its device. Some rows at a time."""
    outputs, inputs = into.shape
    bits, flat = into.view(torch.int16), exponents.view(-1)
    table = flat[:PLACES].short() << 7
    step = max(1, _AT_ONCE // inputs)
    for first in range(0, outputs, step):
        rest, places = _in_order(codes[first : first + step], inputs)
        numbers = (rest & 0x80).short() << 8 | (rest & 0x7F).short()
        bits[first : first + step] = numbers | table[places.int()]
    words, strips = flat[PLACES:].view(torch.int32), _strips(outputs)
    ends, listed = words[:strips], words[strips : strips + room(outputs, inputs)]
    numbers = torch.arange(len(listed), dtype=torch.int32, device=into.device)
    strip = torch.searchsorted(ends, numbers, right=True)
    rows = torch.where(numbers < ends[-1], strip, 0) * _STRIP + (listed >> 16 & 0xFF)
    at = rows * inputs + (listed & 0xFFFF)
    whole = bits.view(-1)
    whole[at] = whole[at] & ~(0xFF << 7) | ((listed >> 24 & 0xFF) << 7).short()


def _in_order(codes: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of sign and mantissa, and the places, each ``[rows, inputs]`` in the order of the weights."""
    rows, blocks = len(codes), inputs // _BLOCK
    whole = blocks * _BLOCK

    def ordered(lying: torch.Tensor) -> torch.Tensor:
        return lying.reshape(rows, blocks, _BLOCK // 16, 2, 8).transpose(2, 3).reshape(rows, whole)

    rest, halves = codes[:, :inputs], codes[:, inputs:]
    of_blocks = halves[:, : whole // 2].reshape(rows, blocks, _BLOCK // 2)
    of_others = halves[:, whole // 2 :, None]
    places = [
        ordered(torch.cat([of_blocks & 15, of_blocks >> 4], dim=2)),
        torch.cat([of_others & 15, of_others >> 4], dim=2).reshape(rows, inputs - whole),
    ]
    return torch.cat([ordered(rest[:, :whole]), rest[:, whole:]], dim=1), torch.cat(places, dim=1)


def _parts_of(tensor: ExpertTensor) -> Iterator[tuple[str, tuple[int, ...], str]]:
    outputs, inputs = tensor.shape
    if tensor.dtype is not torch.bfloat16:
        raise _refused(f"an expert's {tensor.name} is {tensor.dtype}, and it is of bfloat16")
    if inputs % 2 or inputs > _COLUMNS:
        raise _refused(f"an expert's {tensor.name} has {inputs} inputs, and it takes even numbers up to {_COLUMNS}")
    yield f"{tensor.name}_codes", (outputs, inputs // 2 * 3), "uint8"
    yield f"{tensor.name}_exponents", (lines(outputs, inputs), _LINE), "uint8"


def _refused(why: str) -> InvalidConfig:
    return InvalidConfig("experts_as", LOSSLESS.name, why)


def _strips(outputs: int) -> int:
    return -(-outputs // _STRIP)


def lines(outputs: int, inputs: int) -> int:
    """Of 64 bytes, of a matrix's exponents."""
    return -(-(PLACES + 4 * (_strips(outputs) + room(outputs, inputs))) // _LINE)
