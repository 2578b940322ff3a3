"""Linear layers whose weights stay in the codes that a checkpoint has them in.

One compiled product computes them, of any number of rows: a row's result does not depend on the rows beside it, and no
weight is ever numbers.
"""

from __future__ import annotations

import torch
from torch import nn

from greenroom.moe.native.rows import GroupedMatrix, LinearWeights, NativeRows


class StoredLinear(nn.Module):
    """In the place of a ``nn.Linear``, whose ``bias`` it takes over. ``store`` gives it its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._native: NativeRows | None = None
        self._weights: LinearWeights | None = None

    def store(self, native: NativeRows, matrix: GroupedMatrix) -> None:
        """``matrix[out_features, in_features]``: on the CPU, as is the bias, which must not move from now on."""
        for number, tensor in enumerate(matrix.tensors):
            self.register_buffer(f"part_{number}", tensor, persistent=False)
        self._native = native
        self._weights = native.linear_weights(matrix, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """What it would be as numbers, on the meta device: models ask for its dtype. It has no numbers."""
        return torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16, device="meta")

    @property
    def weights(self) -> LinearWeights:
        assert self._weights is not None, "``store`` has been called when a model is loaded"
        return self._weights

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows[R, in_features]`` to ``[R, out_features]``, both bf16 and contiguous."""
        assert self._native is not None
        return self._native.linear_layer(rows, self.weights)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs[..., in_features]`` to ``[..., out_features]``. Raises TypeError unless they are bf16 on the CPU."""
        if inputs.dtype is not torch.bfloat16 or inputs.device.type != "cpu":
            raise TypeError(
                f"a linear layer in codes takes bfloat16 on the CPU, not {inputs.dtype} on {inputs.device.type}: use "
                "--dense-as expanded"
            )
        out = self.product(inputs.reshape(-1, self.in_features).contiguous())
        return out.view(*inputs.shape[:-1], self.out_features)
