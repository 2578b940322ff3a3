"""A linear head on sparse features: multinomial logistic regression, in numpy.

Minimises Σ weight · cross-entropy(target, softmax(features · head + bias)) + ½ · penalty · |head|². At the minimum the
head is a sum of the rows that it was fitted to, so what is sought is how much of each row: as many numbers as there are
rows, not features. Products of rows are taken once, and serve every fit to some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
_POWER_ROUNDS = 12
_COLUMNS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Rows:
    """Sparse rows: ``values`` of the features ``columns``, of the rows ``numbers``, which ascend."""

    values: Floats
    columns: Ints
    numbers: Ints
    count: int
    features: int

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], vocabulary: Mapping[str, int]) -> Rows:
        """Features that the vocabulary lacks are passed over."""
        entries = [
            (number, vocabulary[name], value)
            for number, row in enumerate(rows)
            for name, value in row.items()
            if name in vocabulary
        ]
        numbers, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return cls(
            np.array(values, dtype=np.float32),
            np.array(columns, dtype=np.int64),
            np.array(numbers, dtype=np.int64),
            len(rows),
            len(vocabulary),
        )

    def products(self) -> Floats:
        """[rows, rows]: of each row with each."""
        found = np.zeros((self.count, self.count), dtype=np.float32)
        order = np.argsort(self.columns, kind="stable")
        columns, numbers, values = self.columns[order], self.numbers[order], self.values[order]
        for start in range(0, self.features, _COLUMNS_AT_ONCE):
            part = slice(*np.searchsorted(columns, [start, start + _COLUMNS_AT_ONCE]))
            dense = np.zeros((self.count, min(_COLUMNS_AT_ONCE, self.features - start)), dtype=np.float32)
            dense[numbers[part], columns[part] - start] = values[part]
            found += dense @ dense.T
        return found

    def combined(self, shares: Floats) -> Floats:
        """[features, k]: the rows' sum, of each as much as ``shares`` [rows, k] says."""
        found = np.zeros((self.features, shares.shape[1]), dtype=np.float32)
        np.add.at(found, self.columns, self.values[:, None] * shares[self.numbers])
        return found


def probabilities(scores: Floats) -> Floats:
    """Softmax of each row."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), dtype=np.float32)


def most_probable(shares: Floats, types: int) -> tuple[Ints, Floats]:
    """For each row of probabilities the best of the first ``types`` columns, and how sure that is.

    The column behind them, if there is one, stands for texts that ask for nothing. Then the best is as sure as it is
    probable beside that column alone: two types that are alike probable do not make a wish doubtful.
    """
    best = shares[:, :types].argmax(axis=1)
    own = shares[np.arange(len(best)), best]
    if shares.shape[1] > types:
        own = own / (own + shares[:, types])
    return best, own


def fit_shares(products: Floats, targets: Floats, weights: Floats, *, penalty: float, rounds: int) -> Floats:
    """How much of each row the head is, [rows, types], after ``rounds`` steps of Nesterov's accelerated gradient.

    ``products`` [rows, rows], symmetric; ``targets`` [rows, types]: the probabilities that the head should give;
    ``weights`` [rows]: what each row counts. The step is 1 ÷ the gradient's Lipschitz constant: no line search.
    """
    importance = weights[:, None]
    step = 1.0 / (0.5 * _largest_curvature(products, weights) + penalty)
    ratio = float(np.sqrt(penalty * step))
    most = (1.0 - ratio) / (1.0 + ratio)
    shares = ahead = np.zeros_like(targets)
    momentum = 1.0
    for _ in range(rounds):
        error = importance * (probabilities(products @ ahead) - targets)
        new = (ahead - step * (error + penalty * ahead)).astype(np.float32)
        following = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = (new + min((momentum - 1.0) / following, most) * (new - shares)).astype(np.float32)
        shares, momentum = new, following
    return shares


def _largest_curvature(products: Floats, weights: Floats) -> float:
    """The largest eigenvalue of the weighted products, by the power method, with a tenth to spare."""
    vector = np.ones(len(weights), dtype=np.float32)
    largest = 1.0
    for _ in range(_POWER_ROUNDS):
        vector = weights * (products @ (vector / np.linalg.norm(vector)))
        largest = float(np.linalg.norm(vector))
    return 1.1 * largest
