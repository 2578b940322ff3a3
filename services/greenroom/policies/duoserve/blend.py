"""Chances from several logits, weighted by how well each has foretold so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Logits = NDArray[np.floating]

_KEEP = 0.9998
"""What is kept of the evidence at each lesson."""
_PRIOR = 200.0
_MOST = 15.0


class Blend:
    """An online logistic regression: chance = σ(Σ wᵢ xᵢ + b) over the logits xᵢ of several predictors.

    Each lesson is one Newton step on all evidence so far, of which older lessons count less. ``start``: the weights
    before any lesson, in which ``_PRIOR`` pairs of a row and an expert are believed.
    """

    def __init__(self, start: tuple[float, ...]) -> None:
        self._weights: Array = np.array([*start, 0.0])
        self._evidence: Array = np.eye(len(self._weights)) * _PRIOR

    @property
    def weights(self) -> Array:
        """Of each predictor, and the bias."""
        return self._weights

    def chances(self, *logits: Logits) -> Array:
        """Of each pair of a row and an expert, in the shape of the logits."""
        total = np.full(logits[0].shape, self._weights[-1])
        for weight, each in zip(self._weights.tolist(), logits, strict=False):
            total += weight * each
        found: Array = 1 / (1 + np.exp(-np.clip(total, -_MOST, _MOST)))
        return found

    def learn(self, picked: NDArray[np.bool_], *logits: Logits) -> None:
        """``picked``, in the shape of the logits: what really happened."""
        chance = self.chances(*logits).ravel()
        inputs = np.stack([*(each.ravel().astype(np.float64) for each in logits), np.ones(chance.size)])
        self._evidence *= _KEEP
        self._evidence += (inputs * (chance * (1 - chance))) @ inputs.T
        self._weights += np.linalg.solve(self._evidence, inputs @ (picked.ravel() - chance))
