"""Foresees later layers' picks by maps that were fitted to the residual stream, in place of the layers' routers.

A layer's rows hold nearly all that the next layers' routers will see. A router run ahead reads them as if no layer came
between; a map that was fitted to what those routers really picked reads what the layers between will make of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Scores


class _Maps(NamedTuple):
    """One layer's, transposed as ``nn.functional.linear`` takes them, in the model's dtype."""

    down: torch.Tensor | None
    offset: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor


class ResidualMaps:
    """The maps of a file, on the model's device in its ``dtype``."""

    def __init__(self, file: ResidualFile, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> None:
        self._form = file.of
        self._experts = file.experts_per_layer

        def tensor(array: NDArray[Any]) -> torch.Tensor:
            return torch.tensor(array, dtype=dtype, device=device)

        self._maps = [
            _Maps(
                None if one.down is None else tensor(one.down.T),
                *(tensor(one.offset), tensor(one.up.T), tensor(one.bias)),
            )
            for one in file.layers
        ]

    def targets(self, layer: int) -> range:
        """The layers that it foresees on the rows of ``layer``."""
        return self._form.targets(layer, len(self._experts))

    def logits(self, layer: int, start: int, stop: int, rows: torch.Tensor) -> torch.Tensor:
        """``[T, M]``, float: of the experts of the layers ``[start, stop)``, all ``targets``, for ``rows[T, H]``."""
        maps, linear = self._maps[layer], nn.functional.linear
        if maps.down is not None:
            rows = linear(rows, maps.down, maps.offset)
            if self._form.silu:
                rows = nn.functional.silu(rows)
        first = sum(self._experts[layer + 1 : start])
        own = slice(first, first + sum(self._experts[start:stop]))
        return linear(rows, maps.up[own], maps.bias[own]).detach().float()


def chances(logits: Scores) -> Scores:
    """σ(x) of each logit x."""
    found: Scores = np.reciprocal(1 + np.exp(-np.clip(logits, -50, 50)))
    return found


def check_fits(file: ResidualFile, name: str, experts_per_layer: tuple[int, ...], hidden: int) -> None:
    """Raises InvalidConfig where the file, called ``name``, is not of a model of this shape."""
    if file.experts_per_layer != experts_per_layer or file.of.hidden != hidden:
        allowed = f"one of this model, {len(experts_per_layer)} layers with {sum(experts_per_layer)} experts in all, "
        raise InvalidConfig(
            file.KIND, f"{name}: {file.shape}, rows of {file.of.hidden}", f"{allowed}rows of {hidden} numbers"
        )
