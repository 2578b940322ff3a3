"""Popularity and affinity of one task type of one model, in which old sequences fade."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenroom.predictor.traces.counts import Floats, SequenceCounts, Shape


@dataclass(slots=True, eq=False)
class Statistics:
    """Sums over sequences, each worth 1 when it comes and half of it ``half_life`` sequences later.

    ``popularity[l, e]`` and ``affinity[l, a, b]``: sums of the sequences' shares (``SequenceCounts``), so a layer of
    either sums to ``weight`` at most. ``sequences``: how many there were, none faded.
    """

    shape: Shape
    popularity: Floats
    affinity: Floats
    weight: float = 0.0
    sequences: int = 0

    @classmethod
    def empty(cls, shape: Shape) -> Statistics:
        layers, experts = shape.layers, shape.experts
        return cls(shape, np.zeros((layers, experts), np.float32), np.zeros((layers - 1, experts, experts), np.float32))

    def add(self, counts: SequenceCounts, half_life: float) -> None:
        keep = np.float32(0.5 ** (1 / half_life))
        for mine, new in ((self.popularity, counts.popularity), (self.affinity, counts.affinity)):
            mine *= keep
            mine += new
        self.weight = self.weight * float(keep) + 1.0
        self.sequences += 1

    def copy(self) -> Statistics:
        return Statistics(self.shape, self.popularity.copy(), self.affinity.copy(), self.weight, self.sequences)

    def audit(self) -> None:
        """Raises AssertionError where the sums can not be those of any sequences."""
        for sums in (self.popularity, self.affinity):
            assert np.isfinite(sums).all()
            assert (sums >= 0).all()
            assert (sums.sum(axis=tuple(range(1, sums.ndim))) <= self.weight * 1.001 + 1e-6).all()
        assert 0 <= self.weight <= self.sequences * 1.001
