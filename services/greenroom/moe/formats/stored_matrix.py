"""How a quantisation method stores one matrix of a checkpoint: in several tensors beside each other, its *parts*.

``layers.0.mlp.experts.3.up_proj.weight`` and ``….weight_scale_inv``, for example, are two parts. A format of records
(``GroupedFormat``) may serve several methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import UnsupportedModel
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.grouped_format import MatrixFormat


class NotServed(UnsupportedModel):
    """Settings of a quantisation method for which there is no format. The message says what they are."""


class MatrixStorage(Protocol):
    @property
    def parts(self) -> tuple[str, ...]:
        """The last components of the parts' names. They stand in the place of ``weight``."""
        ...

    def is_part(self, tensor: StoredTensor) -> bool:
        """Whether a tensor of such a name is one: a ``weight`` may hold numbers as well."""
        ...

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        """``stored``: all parts of one matrix. Raises CorruptCheckpoint, with file and tensor, if their dtypes and
        shapes do not belong together."""
        ...

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Raises BadCodes if some weights are no numbers, or none of ``dtype``. Codes of 8 bits are given as uint8."""
        ...

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the method's format of records makes a record of (``GroupedFormat.make``), of this matrix alone."""
        ...

    def numbers(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """``[outputs, inputs]``, as transformers makes them."""
        ...


def _nothing(module: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a checkpoint has its experts in. ``storage``: how it stores a matrix of them, and of its linear layers.
    None: as one tensor, or in tensors that a converter of transformers puts together (``loading/quantization.py``).

    ``leaves_out(module)``: whether this linear layer is said to be stored as numbers. ``of_tensors``: what it is if the
    checkpoint has these tensors, on which some formats depend. ``why_expanded``: why experts can not stay as they are,
    and so the format is plain; empty: they can. ``dense_format_of``: says what
    ``dense_format`` does, where that is not the experts' format.
    """

    format: ExpertFormat
    storage: MatrixStorage | None = None
    leaves_out: Callable[[str], bool] = _nothing
    of_tensors: Callable[[Mapping[str, StoredTensor]], Shipped] | None = None
    why_expanded: str = ""
    dense_format_of: Callable[[Mapping[str, StoredTensor]], MatrixFormat | None] | None = None

    def dense_format(self, stored: Mapping[str, StoredTensor]) -> MatrixFormat | None:
        """What a matrix outside the experts can stay as, of which these parts are stored. None: it becomes numbers."""
        if self.dense_format_of is not None:
            return self.dense_format_of(stored)
        return self.format if isinstance(self.format, MatrixFormat) else None

    def only_expanded(self, why: str) -> Shipped:
        """The same, whose experts can not stay as they are."""
        return replace(self, format=PLAIN_FORMAT, why_expanded=why)
