"""What the formats have in common that keep numbers of bf16 in fewer bytes without losing a bit.

A weight is a byte of sign and mantissa, and its exponent's place in a table of the matrix's commonest. A record has two
tensors of each matrix: ``codes``, and ``exponents`` with the table and those that it lacks. It has room for so many of
these as follows from the shape, so each record of a layer has the same size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch

from greenroom.core.errors import InvalidConfig
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import DoesNotFit, ExpertFormat
from greenroom.moe.formats.grouped_format import is_joined
from greenroom.moe.native.rows import native_rows, native_rows_or_none

EXPERTS_AS_LOSSLESS: Final = "lossless"
"""What asks for one of them."""

PLACES: Final = 16
"""Bytes of the table."""
LINE: Final = 64
"""Bytes of a row of ``exponents``."""

_MOST_INPUTS: Final = 1 << 16

AT_ONCE: Final = 1 << 18
"""Weights that torch works on at a time: few enough that they stay in the processor's cache."""


class LosslessFormat(ExpertFormat, ABC):
    """Of experts that are two matrices of bf16, each with an even number of inputs; an ``EncodesNumbers``.

    Encoding raises NativeUnavailable where nothing was compiled.
    """

    name: str
    version: int
    planes: bool
    """What the compiled products take its records as."""
    listed: int
    """How many exponents the table has."""
    inputs_at_once: int
    """Products are fast where a matrix has a multiple of so many inputs."""

    def record(self, layer: MoeLayer) -> RecordLayout:
        """Raises InvalidConfig for experts of any other kind."""
        if not layer.stacked or [len(tensor.shape) for tensor in layer.tensors] != [2, 2]:
            raise _refused(f"{layer.name} has other experts than two matrices without biases")
        return RecordLayout.of(part for tensor in layer.tensors for part in self._parts_of(tensor))

    def encode(self, tensor: ExpertTensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        if numbers.shape != tensor.shape or numbers.dtype is not torch.bfloat16:
            raise ValueError(f"{tensor.name} has {numbers.dtype} {tuple(numbers.shape)}, not bfloat16 {tensor.shape}")
        outputs, inputs = tensor.shape
        joined, there = is_joined(tensor), self.room(outputs, inputs)
        codes = torch.empty(*self.codes_shape(outputs, inputs, joined=joined), dtype=torch.uint8)
        exponents = torch.zeros(self.lines(outputs, inputs, joined=joined), LINE, dtype=torch.uint8)
        rare = native_rows().lossless_encode(
            numbers.contiguous(), there, codes, exponents, planes=self.planes, joined=joined
        )
        if rare > there:
            raise DoesNotFit(
                f"{rare} weights have other exponents than the {self.listed} commonest, and there is room for {there}"
            )
        return {f"{tensor.name}_codes": codes, f"{tensor.name}_exponents": exponents}

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        left = iter(weights)
        for tensor, target in zip(layer.tensors, into, strict=True):
            codes, exponents, joined = next(left), next(left), is_joined(tensor)
            native = native_rows_or_none() if target.device.type == "cpu" else None
            if native is not None:
                native.lossless_numbers(codes, exponents, target, planes=self.planes, joined=joined)
            else:
                self.expand_by_torch(codes, exponents, target, joined=joined)

    def expanding_bytes(self, layer: MoeLayer) -> int:
        return max(self._expanding_bytes(*tensor.shape) for tensor in layer.tensors)

    @abstractmethod
    def room(self, outputs: int, inputs: int) -> int:
        """How many weights of a matrix may have another exponent than the commonest."""
        ...

    @abstractmethod
    def codes_shape(self, outputs: int, inputs: int, *, joined: bool) -> tuple[int, ...]:
        """``joined``: the matrix is gates, then as many ups."""
        ...

    @abstractmethod
    def lines(self, outputs: int, inputs: int, *, joined: bool) -> int:
        """Of LINE bytes, of a matrix's exponents."""
        ...

    @abstractmethod
    def expand_by_torch(
        self, codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor, *, joined: bool
    ) -> None:
        """Write a matrix's numbers into ``into[outputs, inputs]``, on its device. Some rows at a time."""
        ...

    @abstractmethod
    def _expanding_bytes(self, outputs: int, inputs: int) -> int:
        """What ``expand_by_torch`` takes meanwhile."""
        ...

    def _parts_of(self, tensor: ExpertTensor) -> Iterator[tuple[str, tuple[int, ...], str]]:
        outputs, inputs = tensor.shape
        if tensor.dtype is not torch.bfloat16:
            raise _refused(f"an expert's {tensor.name} is {tensor.dtype}, and it is of bfloat16")
        if inputs % 2 or inputs > _MOST_INPUTS:
            raise _refused(
                f"an expert's {tensor.name} has {inputs} inputs, and it takes even numbers up to {_MOST_INPUTS}"
            )
        joined = is_joined(tensor)
        yield f"{tensor.name}_codes", self.codes_shape(outputs, inputs, joined=joined), "uint8"
        yield f"{tensor.name}_exponents", (self.lines(outputs, inputs, joined=joined), LINE), "uint8"


def _refused(why: str) -> InvalidConfig:
    return InvalidConfig("experts_as", EXPERTS_AS_LOSSLESS, why)


def bits_of(rest: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The bits of bf16 (int16) of bytes of sign and mantissa, and of exponents (int16)."""
    return (rest & 0x80).short() << 8 | (rest & 0x7F).short() | exponents << 7
