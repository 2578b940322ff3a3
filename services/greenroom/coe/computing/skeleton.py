"""A model of one architecture that computes with the weights of any of its experts, where they lie."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from greenroom.coe.loading.architecture import Architecture, owner_of
from greenroom.experts.pack.layout import ExpertWeights

_Slot = tuple[dict[str, torch.Tensor], str]


class Skeleton:
    """One executor's own: two threads must not use it at once. Without weights it can not compute.

    Weights are put into the modules' own dictionaries: 3 µs for the 122 tensors of a ResNet-18, against 190 µs of
    ``torch.func.functional_call`` (docs/decisions/0031).
    """

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        """``device``: where the weights will lie. What no checkpoint holds is copied there, once."""
        self.architecture = architecture
        self.device = device
        self.model: Any = copy.deepcopy(architecture.model)
        self._slots: list[list[_Slot]] = []
        for names in architecture.names:
            owners = [owner_of(self.model, name) for name in names]
            self._slots.append(list({(id(owner), leaf): (owner, leaf) for owner, leaf in owners}.values()))
        self._nothing = [owner[leaf] for (owner, leaf), *_ in self._slots]
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)

    @contextlib.contextmanager
    def using(self, weights: ExpertWeights) -> Iterator[Any]:
        """The model with these weights: views of a record of the architecture's layout. Nothing is copied.

        They must stay where they are until the context is left, and until the device has computed what was asked of it.
        """
        self._put(weights)
        try:
            yield self.model
        finally:
            self._put(self._nothing)

    def _put(self, weights: ExpertWeights | list[torch.Tensor]) -> None:
        for slots, tensor in zip(self._slots, weights, strict=True):
            for owner, leaf in slots:
                owner[leaf] = tensor
