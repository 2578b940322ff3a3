"""A source with all experts in memory: the reference for every other one, and its twin in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving


class ResidentExperts:
    """An ExpertSource over ``weights[layer][expert]``. Yields the picked experts in ascending order."""

    def __init__(self, weights: Sequence[Sequence[ExpertWeights]]) -> None:
        self._weights = weights

    @classmethod
    def of_pack(cls, pack: PackFile) -> ResidentExperts:
        """Reads the whole pack. Raises PackError if it was altered."""
        weights = []
        for layer, spec in enumerate(pack.manifest.layers):
            experts = []
            for expert in range(spec.experts):
                record = page_aligned(spec.layout.nbytes)
                pack.read_into(layer, expert, record)
                experts.append(spec.layout.views(torch.frombuffer(record, dtype=torch.uint8)))
            weights.append(experts)
        return cls(weights)

    def step(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def layer_entered(self, layer: int) -> None:
        pass

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        return None

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        pass

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        experts = self._weights[layer]
        return contextlib.nullcontext((int(e), experts[e]) for e in np.unique(picks) if e < len(experts))
