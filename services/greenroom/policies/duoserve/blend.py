"""Chances from several logits, weighted by how well each has foretold so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Logits = NDArray[np.float32]

_KEEP = 0.999
"""What is kept of the evidence at each lesson."""
_PRIOR = 200.0


class Blend:
    """An online logistic regression: chance = σ(Σ wᵢ xᵢ + b) over the logits xᵢ of several predictors.

    Each lesson is one Newton step on all evidence so far, of which older lessons count less. ``start``: the weights
    before any lesson, in which ``_PRIOR`` pairs of a row and an expert are believed.
    """

    def __init__(self, start: tuple[float, ...]) -> None:
        self.weights: Array = np.array([*start, 0.0])
        """Of each predictor, and the bias."""
        self._evidence: Array = np.eye(len(self.weights)) * _PRIOR

    def learn(self, picked: NDArray[np.bool_], *logits: Logits) -> None:
        """``picked``, in the shape of the logits: what really happened."""
        chance = 1 - missed(blended(self.weights.astype(np.float32), *logits)).ravel()
        inputs = np.ones((len(self.weights), chance.size), dtype=np.float32)
        for own, each in zip(inputs, logits, strict=False):
            own.reshape(each.shape)[...] = each
        self._evidence *= _KEEP
        # The prior stays: where logits are all alike, or leave no doubt, lessons are no evidence of their own.
        self._evidence.flat[:: len(self.weights) + 1] += (1 - _KEEP) * _PRIOR
        self._evidence += (inputs * (chance * (1 - chance))) @ inputs.T
        self.weights = self.weights + np.linalg.solve(self._evidence, inputs @ (picked.ravel() - chance))


def blended(weights: Logits, *logits: Logits) -> Logits:
    """Σ wᵢ xᵢ + b of each pair of a row and an expert, in the shape ``[..., M]`` of the logits.

    ``weights[predictors + 1]`` of all experts, or ``[predictors + 1, M]``. The bias is the last.
    """
    total: Logits = logits[0] * weights[0]
    for weight, each in zip(weights[1:], logits[1:], strict=False):
        total += each * weight
    total += weights[-1]
    return total


def missed(logits: Logits) -> Logits:
    """1 − σ(x) of each logit x, however large. Overwrites ``logits``."""
    logits *= -0.5
    np.tanh(logits, out=logits)
    logits *= 0.5
    logits += 0.5
    return logits
