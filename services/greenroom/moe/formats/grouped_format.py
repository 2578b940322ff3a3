"""What the formats have in common whose codes share scales in groups along the inputs: experts of two matrices.

A weight is the number of its code, times the scale of its group, less the group's minimum where a format has minimums.
Matrices are ``[outputs, inputs]``. ``gate_up_proj`` joins gates and ups. ``panels.py`` has the layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from greenroom.core.errors import CorruptCheckpoint
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import ExpertFormat, plain_record
from greenroom.moe.formats.panels import HALF, PANEL, UNIT, panels_of, units_of
from greenroom.moe.native.rows import GroupedCodes

_AT_ONCE: Final = 1 << 20
"""Weights that are expanded at a time: few enough that what they take meanwhile stays in the processor's cache."""

_EXPANDING_BYTES: Final = 16
"""Of a weight meanwhile: codes laid out anew, numbers of 32 bits, their products with scales, and a copy of these."""

Part = tuple[str, tuple[int, ...], str]
"""One of the tensors that a record has for a matrix: the end of its name, its shape, its dtype."""


def is_matrix(tensor: ExpertTensor) -> bool:
    """Whether it is one of an expert's matrices, and not a bias."""
    return len(tensor.shape) == 2


def is_joined(tensor: ExpertTensor) -> bool:
    """Whether it is gates, and behind them as many ups."""
    return tensor.name.startswith("gate_up_proj")


class GroupedFormat(ExpertFormat, ABC):
    """Tensors that are no matrices are numbers of the model's dtype."""

    name: str
    version: int

    @property
    @abstractmethod
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        """What the compiled products compute the first and the second matrix as."""
        ...

    @abstractmethod
    def of_matrix(self, *, joined: bool) -> MatrixFormat:
        """That of an expert's first matrix, which is joined of gates and ups, or of its second one."""
        ...

    def record(self, layer: MoeLayer) -> RecordLayout:
        """Raises CorruptCheckpoint for matrices of odd widths."""
        return RecordLayout.of(self._record(layer))

    def make(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [f"{tensor.name}_{end}" for end, _, _ in self._parts_of(tensor)]
        joined = is_joined(tensor)
        return dict(zip(names, self.of_matrix(joined=joined).lay_out(stored, joined=joined), strict=True))

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        left = iter(weights)
        for tensor, target in zip(layer.tensors, into, strict=True):
            if is_matrix(tensor):
                parts = [next(left) for _ in self._parts_of(tensor)]
                self._expand(parts, target, joined=is_joined(tensor))
            else:
                target[:] = next(left)

    def expanding_bytes(self, layer: MoeLayer) -> int:
        widest = max(units_of(tensor.shape[1]) * UNIT for tensor in layer.tensors if is_matrix(tensor))
        return max(_AT_ONCE, PANEL * widest) * _EXPANDING_BYTES

    def _record(self, layer: MoeLayer) -> Iterator[Part]:
        for tensor in layer.tensors:
            if not is_matrix(tensor):
                yield plain_record(tensor)
                continue
            for end, shape, dtype in self._parts_of(tensor):
                yield f"{tensor.name}_{end}", shape, dtype

    def _parts_of(self, tensor: ExpertTensor) -> tuple[Part, ...]:
        outputs, inputs = tensor.shape
        joined = is_joined(tensor)
        if inputs % 2 or outputs % (4 if joined else 2):
            raise CorruptCheckpoint(
                f"an expert's {tensor.name} is {outputs} by {inputs}, and {self.name} needs even widths"
            )
        own = self.products[0 if joined else 1]
        groups = -(-inputs // own.group) if own.group else 1
        parts = self.of_matrix(joined=joined).parts(panels_of(outputs, joined=joined), units_of(inputs), groups)
        return (*parts, ("order", (inputs,), "int32")) if own.ordered else parts

    def _expand(self, parts: Sequence[torch.Tensor], into: torch.Tensor, *, joined: bool) -> None:
        places = None
        if self.products[0 if joined else 1].ordered:
            parts, places = parts[:-1], torch.argsort(parts[-1])
        panels, units = parts[0].shape[:2]
        outputs, inputs = into.shape
        numbers_of = self.of_matrix(joined=joined).numbers
        step = max(1, _AT_ONCE // (units * UNIT * PANEL))
        for first in range(0, panels, step):
            numbers = numbers_of([part[first : first + step] for part in parts])[..., :inputs]
            if places is not None:
                numbers = numbers[..., places]
            if joined:
                own = into.view(2, outputs // 2, inputs)[:, first * HALF : (first + step) * HALF]
                own.copy_(numbers.transpose(0, 1).reshape(2, -1, inputs)[:, : own.shape[1]])
            else:
                own = into[first * PANEL : (first + step) * PANEL]
                own.copy_(numbers.reshape(-1, inputs)[: len(own)])


class MatrixFormat(GroupedFormat):
    """Both matrices are in the same format.

    ``stored``, of which ``make`` makes a record, are a matrix's codes ``uint8[outputs, inputs]``, its scales
    ``[outputs, groups]``, and minimums like these where the format has such.
    """

    def of_matrix(self, *, joined: bool) -> MatrixFormat:
        return self

    @abstractmethod
    def parts(self, panels: int, units: int, groups: int) -> tuple[Part, ...]:
        """What a record has for a matrix of so many panels, units and groups: codes, scales, minimums. An order of the
        inputs comes behind them."""
        ...

    @abstractmethod
    def lay_out(self, stored: Sequence[torch.Tensor], *, joined: bool) -> tuple[torch.Tensor, ...]:
        """The ``parts`` of a matrix, and the order of its inputs where the products have one."""
        ...

    def parts_alone(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """What is kept of a matrix that belongs to no expert."""
        return self._parts_of(ExpertTensor("weight", (outputs, inputs), torch.bfloat16))

    def lay_out_alone(self, stored: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """As ``lay_out``, into tensors like ``parts_alone``. A few panels at a time, so it takes little meanwhile."""
        orders = int(self.products[1].ordered)  # of the inputs, behind what outputs have
        step = max(1, _AT_ONCE // (stored[0].shape[1] * PANEL))
        for panel in range(0, len(into[0]), step):
            some = [part[panel * PANEL : (panel + step) * PANEL] for part in stored[: len(stored) - orders]]
            made = self.lay_out([*some, *stored[len(some) :]], joined=False)
            for number, (target, part) in enumerate(zip(into, made, strict=True)):
                (target[panel : panel + step] if number < len(into) - orders else target).copy_(part)

    @abstractmethod
    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of some panels, in float32: ``[panels, 2, 16, units * 32]``."""
        ...


class GroupedPair(GroupedFormat):
    """The first matrix in one format, the second one in another."""

    def __init__(self, first: MatrixFormat, second: MatrixFormat) -> None:
        self.name = f"{first.name}-{second.name}"
        self.version = max(first.version, second.version)
        self._first, self._second = first, second

    @property
    def products(self) -> tuple[GroupedCodes, GroupedCodes]:
        return self._first.products[0], self._second.products[1]

    def of_matrix(self, *, joined: bool) -> MatrixFormat:
        return self._first if joined else self._second
