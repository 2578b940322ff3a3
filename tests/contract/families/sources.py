"""Sources of experts that tests drive a model with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile


class ScriptedExperts(ResidentExperts):
    """Resident experts in an order of the test's choosing, behind masks of its choosing; remembers what it was told.

    Each expert's weights are spoiled as soon as the next one is asked for, as a slot's may be.
    """

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.reset()

    def reset(self) -> None:
        """Nothing scripted, nothing remembered."""
        self.order: random.Random | None = None
        self.masks: dict[int, NDArray[np.bool_]] = {}
        self.events: list[tuple[str, int]] = []
        self.picks: dict[int, list[NDArray[np.int64]]] = {}
        self.elsewhere: dict[int, NDArray[np.bool_]] = {}

    @classmethod
    def at(cls, path: Path) -> ScriptedExperts:
        pack = PackFile.open(path)
        source = cls.of_pack(pack)
        pack.close()
        assert isinstance(source, ScriptedExperts)
        return source

    def layer_entered(self, layer: int) -> None:
        self.events.append(("entered", layer))

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        return self.masks.get(layer)

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        self.elsewhere[layer] = rows.copy()

    def routed(
        self, layer: int, picks: NDArray[np.int64]
    ) -> AbstractContextManager[Iterator[tuple[int, ExpertWeights]]]:
        self.events.append(("routed", layer))
        self.picks.setdefault(layer, []).append(picks.copy())
        return contextlib.nullcontext(self._arriving(layer, picks))

    def _arriving(self, layer: int, picks: NDArray[np.int64]) -> Iterator[tuple[int, ExpertWeights]]:
        experts = self._weights[layer]
        picked = [int(expert) for expert in np.unique(picks) if expert < len(experts)]
        if self.order is not None:
            self.order.shuffle(picked)
        for expert in picked:
            lent = tuple(tensor.clone() for tensor in experts[expert])
            yield expert, lent
            for tensor in lent:
                tensor.fill_(float("nan"))


def random_masks(rows: int, experts: int, least: int, seed: int = 0) -> NDArray[np.bool_]:
    """In each row at least ``least`` experts, and one of all rows' numbers from there to all of them."""
    generator = np.random.default_rng(seed)
    allowed = np.zeros((rows, experts), dtype=bool)
    for row in range(rows):
        allowed[row, generator.permutation(experts)[: generator.integers(least, experts + 1)]] = True
    return allowed
