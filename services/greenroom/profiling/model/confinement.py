"""Confining rows to some experts, to measure what that does to the answers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Ids, Mask
from greenroom.policies.base.events import Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.replacement.next_use import NextUse


class Confinement(Protocol):
    """Which experts rows are confined to."""

    def mask(self, sequences: Ids, positions: Ids, layer: int) -> Mask | None:
        """``[rows, experts of the layer]`` for rows of these sequences at these positions; None: none is confined."""
        ...


class RandomRouting:
    """The first ``layers`` MoE layers send each row to as many experts as ever, drawn at random.

    The draw depends only on the seed, the sequence's name, the row's position and the layer. It depends neither on what
    else runs nor on ``layers``, so a longer prefix contains the draws of a shorter one.
    """

    def __init__(self, catalogue: Catalogue, layers: int, *, seed: int, names: dict[int, int]) -> None:
        """``names[sequence]``: what the sequence's draws depend on, such as its prompt's place."""
        self._catalogue = catalogue
        self._layers = layers
        self._seed = np.uint64(seed)
        self._names = names

    def mask(self, sequences: Ids, positions: Ids, layer: int) -> Mask | None:
        if layer >= self._layers:
            return None
        experts, k = int(self._catalogue.experts_per_layer[layer]), int(self._catalogue.top_k[layer])
        names = np.array([self._names[sequence] for sequence in sequences.tolist()], dtype=np.uint64)
        rows = _mixed(_mixed(_mixed(self._seed ^ names) ^ positions.astype(np.uint64)) ^ np.uint64(layer))
        lots = _mixed(rows[:, None] ^ np.arange(1, experts + 1, dtype=np.uint64)[None, :])
        mask = np.zeros(lots.shape, dtype=np.bool_)
        np.put_along_axis(mask, np.argsort(lots, axis=1, kind="stable")[:, :k], True, axis=1)
        return mask


class LackingOne:
    """In ``layer`` each sequence may go to all experts but one: ``lacking[sequence]``."""

    def __init__(self, catalogue: Catalogue, layer: int, lacking: dict[int, int]) -> None:
        self._experts = int(catalogue.experts_per_layer[layer])
        self._layer = layer
        self._lacking = lacking

    def mask(self, sequences: Ids, positions: Ids, layer: int) -> Mask | None:
        if layer != self._layer:
            return None
        lacking = np.array([self._lacking[sequence] for sequence in sequences.tolist()])
        return np.asarray(lacking[:, None] != np.arange(self._experts)[None, :])


class KeptExperts:
    """Each sequence has the experts that were kept for it: ``kept[sequence]``, a mask over all keys."""

    def __init__(self, catalogue: Catalogue, kept: dict[int, Mask]) -> None:
        self._catalogue = catalogue
        self._kept = kept

    def mask(self, sequences: Ids, positions: Ids, layer: int) -> Mask | None:
        span = self._catalogue.spans[layer]
        own, rows = np.unique(sequences, return_inverse=True)
        return np.stack([self._kept[sequence][span] for sequence in own.tolist()])[rows]


class ConfiningPolicy(NextUse):
    """``next-use`` that confines rows after ``confine``."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._confinement: Confinement | None = None
        self._confined = 0
        self._seen: dict[int, int] = {}
        self._positions: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def confine(self, to: Confinement | None) -> int:
        """Confine rows from now on; None frees all rows. To be called when nothing runs.

        Returns the number of layers of steps in which the previous confinement confined rows.
        """
        confined, self._confined = self._confined, 0
        self._confinement = to
        self._seen.clear()
        return confined

    def on_step_started(self, step: Step) -> None:
        super().on_step_started(step)
        if self._confinement is not None:
            self._positions = np.empty(step.rows, dtype=np.int64)
            for row, sequence in enumerate(step.row_sequences.tolist()):
                position = self._seen.get(sequence, 0)
                self._positions[row] = position
                self._seen[sequence] = position + 1

    def row_mask(self, step: Step, layer: int, resident: Mask) -> Mask | None:
        if self._confinement is None:
            return None
        mask = self._confinement.mask(step.row_sequences, self._positions, layer)
        self._confined += mask is not None
        return mask


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al., OOPSLA 2014): every bit of the result depends on every bit."""
    with np.errstate(over="ignore"):
        numbers = np.asarray(numbers + np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)), dtype=np.uint64)
