"""How many of a token's picks a predictor names, by the measures of DuoServe-MoE's Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.predictor.kinds.expert_mlp.shares import many_hot


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Over tokens and layers, each with k picks of which the k likeliest experts are held against.

    ``exact``: share where all were named. ``half``: at least half of them. ``one``: at least one. ``recall``: the share
    of the picks that were named.
    """

    exact: float
    half: float
    one: float
    recall: float


@dataclass(frozen=True, slots=True)
class Recalls:
    """Of every token its recall over the layers, and which sequence it is of: ``values[n]``, ``sequences[n]``."""

    values: NDArray[np.float64]
    sequences: NDArray[np.integer]

    @classmethod
    def of(cls, shares: Sequence[NDArray[np.float64]], sequences: NDArray[np.integer]) -> Recalls:
        """``shares``: of each layer what ``named`` found, the same tokens in every one. Tokens without a pick drop
        out."""
        every = np.stack(list(shares))
        counted = ~np.isnan(every).all(axis=0)
        return cls(np.nanmean(every[:, counted], axis=0), sequences[counted])

    def less(self, other: Recalls) -> Recalls:
        """The gain over another predictor on the same tokens."""
        return Recalls(self.values - other.values, self.sequences)

    def within(self, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
        """The mean's 95 % interval: sequences, whose tokens are alike, are drawn anew ``draws`` times."""
        known, place = np.unique(self.sequences, return_inverse=True)
        sums, counts = np.bincount(place, self.values), np.bincount(place)
        drawn = np.random.default_rng(seed).integers(len(known), size=(draws, len(known)))
        means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float(low), float(high)


def named(scores: NDArray[np.floating], picks: NDArray[np.integer]) -> NDArray[np.float64]:
    """``[n]``: the share of each row's picks that are among the row's highest scores, as many as it picked.

    ``scores[n, E]``; ``picks[n, k]``, one at or above E is none. NaN where a row picked nothing.
    """
    picked = many_hot(picks, scores.shape[1]).astype(np.bool_)
    count = picked.sum(axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : picks.shape[1]]
    right = np.take_along_axis(picked, order, axis=1) & (np.arange(order.shape[1]) < count[:, None])
    return np.where(count > 0, right.sum(axis=1) / np.maximum(count, 1), np.nan)


def accuracy(shares: Sequence[NDArray[np.float64]]) -> Accuracy:
    """Of what ``named`` found, layer by layer. Rows without a pick do not count."""
    found = np.concatenate(list(shares))
    found = found[~np.isnan(found)]
    return Accuracy(
        exact=float((found == 1).mean()),
        half=float((found >= 0.5).mean()),
        one=float((found > 0).mean()),
        recall=float(found.mean()),
    )
