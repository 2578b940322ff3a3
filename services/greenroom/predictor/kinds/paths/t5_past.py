"""The form ``t5`` weighed against what a sequence has picked so far, as the policy reuse knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.t5 import PAST_WEIGHTS
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.path.fit import sequence_logits
from greenroom.predictor.kinds.paths.counts import logit
from greenroom.predictor.kinds.paths.logistic import fitted
from greenroom.replay.traces.routing_trace import RoutingTrace

Array = NDArray[np.float32]

_BEGIN = (0.8, 0.5, 0.3)
"""The weights where there are no rows to weigh by."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsWithLogits:
    """The network's ``logits[R, N]`` of the rows of ``trace``, what they picked, and which tokens were ``unknown[R]``.

    The first ``weighed`` rows are fitted to, the others are measured by. The network has learnt from none.
    """

    trace: RoutingTrace
    logits: Array
    picked: Array
    unknown: NDArray[np.bool_]
    weighed: int


def weighed_with_past(
    rows: RowsWithLogits, popularity: NDArray[np.floating], reuse: ReuseFile
) -> tuple[Mapping[str, Array], Mapping[str, float]]:
    """The tensors of ``past_shapes``, and of the measured picks the share that is foreseen, by name: ``alone`` and
    ``past``. ``popularity[N]``: the share of tokens that picks each expert."""
    usual: Array = logit(popularity.astype(np.float32))
    weights = np.zeros((PAST_WEIGHTS, len(reuse.experts_per_layer)), dtype=np.float32)
    bias = np.zeros_like(usual)
    hits, first = {"alone": 0.0, "past": 0.0}, 0
    for layer, width in enumerate(reuse.experts_per_layer):
        span = slice(first, first + width)
        first += width
        own, picked, base = rows.logits[:, span], rows.picked[:, span], usual[span]
        known = sequence_logits(rows.trace, layer, reuse)
        past = known.logits - base
        features = np.stack([own[known.rows] - base, past, past * rows.unknown[known.rows, None]])
        learnt = int(np.searchsorted(known.rows, rows.weighed))
        weights[:, layer], bias[span] = fitted(
            features[:, :learnt], picked[known.rows[:learnt]], base, np.array(_BEGIN, dtype=np.float32)
        )
        together = own.copy()
        together[known.rows] = base + bias[span] + np.einsum("fre,f->re", features, weights[:, layer])
        for name, logits in (("alone", own), ("past", together)):
            hits[name] += foreseen(logits[rows.weighed :], picked[rows.weighed :])
    total = max(1.0, float(rows.picked[rows.weighed :].sum()))
    tensors = {"past.popularity": usual, "past.bias": bias, "past.weights": weights}
    return tensors, {name: count / total for name, count in hits.items()}


def foreseen(logits: Array, picked: Array) -> float:
    """Of one layer's ``picked[R, E]`` how many are among the likeliest of their row, as many as the row has picks."""
    order = np.argsort(-logits, axis=1, kind="stable")
    among = np.arange(picked.shape[1]) < picked.sum(axis=1, keepdims=True)
    return float((np.take_along_axis(picked, order, axis=1) * among).sum())
