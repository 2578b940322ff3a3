"""Chances from several logits, weighted by how well each has foretold so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Logits = NDArray[np.float32]

_KEEP = 0.999
"""What is kept of the evidence at each lesson."""
_PRIOR = 2.0
"""How much doubt, Σ p (1 − p) over pairs of a row and an expert of chance p, overrules the weights from before any
lesson. Usual pairs leave a tenth each."""
_PRIOR_BIAS = 4.0
"""The same for an expert's bias, of its own pairs."""


class Blend:
    """An online logistic regression: chance of expert j = σ(Σ wᵢ xᵢⱼ + bⱼ) over the logits xᵢ of several predictors.

    Each lesson is one Newton step on all evidence so far, of which older lessons count less; the biases take theirs
    each by itself. ``start``: the weights before any lesson. They are overruled after as many lessons whatever the size
    of the logits: a predictor whose logits are small by nature gets its large weight as soon as another a small one.

    A step does not trust how little doubt there was in the lesson itself. Where a predictor was sure and wrong that is
    nearly none, and a plain Newton step would go far beyond the mark. So the lesson's own pairs count with the
    curvature of the parabola that lies above their loss wherever the step leads (Jaakkola and Jordan, 2000).
    """

    def __init__(self, start: tuple[float, ...], experts: int) -> None:
        self.weights: Array = np.array(start)
        """Of each predictor."""
        self.bias: Array = np.zeros(experts)
        self._evidence: Array = np.zeros((len(start), len(start)))
        self._bias_evidence: Array = np.zeros(experts)
        self._squares: Array = np.zeros(len(start))  # the mean of each predictor's squared logits, of recent lessons
        self._lessons = 0

    def learn(self, picked: NDArray[np.bool_], *logits: Logits) -> None:
        """``picked[T, experts]``, in the shape of the logits: what really happened."""
        inputs = np.array([each.ravel() for each in logits], dtype=np.float64)  # [predictors, T · experts]
        total = (self.weights @ inputs).reshape(-1, len(self.bias)) + self.bias
        half = np.tanh(total / 2)
        wrong, doubt = picked - (1 + half) / 2, (1 - half * half) / 4
        careful = np.maximum(_curvature_above(total, half) - doubt, 0)  # of this step alone
        self._lessons += 1
        share = max(1 - _KEEP, 1 / self._lessons)
        self._squares += share * ((inputs * inputs).mean(axis=1) - self._squares)
        self._evidence *= _KEEP
        self._evidence += (inputs * doubt.ravel()) @ inputs.T
        self._bias_evidence *= _KEEP
        self._bias_evidence += doubt.sum(axis=0)
        # The prior stays: where logits are all alike, or leave no doubt, lessons are no evidence of their own.
        prior = np.diag(_PRIOR * np.maximum(self._squares, 1e-12))
        evidence = self._evidence + (inputs * careful.ravel()) @ inputs.T + prior
        self.weights = self.weights + np.linalg.solve(evidence, inputs @ wrong.ravel())
        self.bias = self.bias + wrong.sum(axis=0) / (self._bias_evidence + careful.sum(axis=0) + _PRIOR_BIAS)


def _curvature_above(logits: Array, half: Array) -> Array:
    """tanh(x / 2) / 2x of each logit x, ¼ at 0. ``half``: tanh(x / 2)."""
    found = np.full_like(logits, 0.25)
    return np.divide(half, 2 * logits, out=found, where=np.abs(logits) > 1e-6)


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
