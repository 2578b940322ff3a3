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
