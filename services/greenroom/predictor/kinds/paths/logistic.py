"""A logistic regression whose weights are common to a layer's experts, by Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Wide = NDArray[np.float64]

_ROUNDS: Final = 12
_HALVINGS: Final = 6
_RIDGE: Final = 2.0
"""Weights stay near those they began with where the samples say little."""
_DONE: Final = 1e-5
"""The share by which the loss falls at least in a round, but for the last."""


def fitted(
    features: Array, picked: Array, base: Array, begin: Array, is_up: Callable[[], bool] = lambda: False
) -> tuple[Array, Array]:
    """``weights[F]`` and ``bias[E]`` of logit = base + bias + Σ_f weights[f] · features[f].

    ``features[F, R, E]``, ``picked[R, E]``: 0 or 1, ``base[E]``. ``begin[F]``: what the weights are without any rows,
    and when ``is_up`` says that time is up.
    """
    count, rows, width = features.shape
    flat = features.reshape(count, -1)
    weights: Wide = begin.astype(np.float64)
    bias: Wide = np.zeros(width)
    if not rows:
        return begin.astype(np.float32), bias.astype(np.float32)
    logits, loss = _loss(flat, picked, base, weights, bias, begin)
    for _ in range(_ROUNDS):
        if is_up():
            break
        chance = 1 / (1 + np.exp(-logits))
        wrong, spread = chance - picked, chance * (1 - chance)
        gradient = np.concatenate((flat @ wrong.ravel(), wrong.sum(axis=0)))
        gradient[:count] += _RIDGE * (weights - begin)
        gradient[count:] += _RIDGE * bias
        scaled = flat * spread.ravel()
        hessian = np.zeros((count + width, count + width))
        hessian[:count, :count] = scaled @ flat.T
        hessian[:count, count:] = scaled.reshape(count, rows, width).sum(axis=1)
        hessian[count:, :count] = hessian[:count, count:].T
        hessian[count:, count:] = np.diag(spread.sum(axis=0))
        hessian += _RIDGE * np.eye(count + width)
        step = np.linalg.solve(hessian, gradient)
        for _ in range(_HALVINGS):
            new_weights, new_bias = weights - step[:count], bias - step[count:]
            new_logits, new_loss = _loss(flat, picked, base, new_weights, new_bias, begin)
            if new_loss <= loss:
                break
            step /= 2
        else:
            break
        fell = loss - new_loss
        weights, bias, logits, loss = new_weights, new_bias, new_logits, new_loss
        if fell < _DONE * loss:
            break
    return weights.astype(np.float32), bias.astype(np.float32)


def _loss(flat: Array, picked: Array, base: Array, weights: Wide, bias: Wide, begin: Array) -> tuple[Array, float]:
    logits: Array = (weights.astype(np.float32) @ flat).reshape(picked.shape)
    logits += (base + bias).astype(np.float32)
    # log(1 + e^z) − y z
    total = float((np.logaddexp(0, logits) - picked * logits).sum(dtype=np.float64))
    return logits, total + _RIDGE / 2 * float(np.square(weights - begin).sum() + np.square(bias).sum())
