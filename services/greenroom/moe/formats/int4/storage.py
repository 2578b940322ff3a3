"""What the layouts of GPTQ, AWQ and compressed-tensors have in common as storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.moe.formats.int4.matrix import Int4Matrix
from greenroom.moe.formats.int4.record import codes_of


class Int4Storage(ABC):
    """Most of a ``MatrixStorage``: a layout says which matrix its tensors are. ``ordered``: records have an order of
    the inputs."""

    ordered: bool

    @abstractmethod
    def matrix(self, parts: Sequence[torch.Tensor]) -> Int4Matrix:
        """Of the parts of one matrix, in the order of ``parts``."""
        ...

    def is_part(self, tensor: StoredTensor) -> bool:
        """Always: no other tensors have such names."""
        return True

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Raises UnsupportedModel for an order where the records have none."""
        return codes_of(self.matrix(parts), ordered=self.ordered)

    def numbers(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return self.matrix(parts).numbers(dtype)
