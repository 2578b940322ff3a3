"""What stands in for routers run ahead, and for paths foretold, where routing was recorded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.replay.traces.routing_trace import RoutingTrace

_DRAWN, _MOST_SHIFT, _HALVINGS = 4_000, 12.0, 24
"""How the shift of GradedPredictions is found: rows drawn, its upper bound, halvings of the interval."""


class TracePredictions:
    """Answers requests for the ``router``'s predictions from the trace itself, with a given ``recall``.

    That share of each row's picks is predicted; in place of the others, wrong experts are.
    """

    def __init__(self, catalogue: Catalogue, recall: float, *, seed: int = 0) -> None:
        if not 0 <= recall <= 1:
            raise InvalidConfig("recall", recall, "a share from 0 to 1")
        self._catalogue = catalogue
        self._recall = recall
        self._random = np.random.default_rng(seed)

    def answer(self, request: PredictionRequest, picks: NDArray[np.integer]) -> Prediction:
        """``picks[T, layers, k]``: the step's. The answer's values are ``[T, M]``, above 1/2 for a predicted pick."""
        values = [self._layer(layer, picks[:, layer]) for layer in range(*request.layers)]
        return Prediction(request, "trace", np.concatenate(values, axis=1).astype(np.float32))

    def _layer(self, layer: int, picks: NDArray[np.integer]) -> NDArray[np.float64]:
        experts = int(self._catalogue.experts_per_layer[layer])
        known = self._random.random(picks.shape) < self._recall
        values = self._random.random((len(picks), experts)) / 2
        rows, places = np.nonzero(picks < experts)
        own = picks[rows, places]
        named = np.zeros(values.shape, dtype=np.bool_)
        named[rows, own] = known[rows, places]
        missed = np.bincount(rows, weights=~known[rows, places], minlength=len(picks)).astype(np.int64)
        candidates = values.copy()
        candidates[rows, own] = -1.0
        # As many wrong experts as picks are missed: those of the highest values.
        for row in missed.nonzero()[0]:
            others = np.argsort(-candidates[row])[: missed[row]]
            named[row, others[candidates[row, others] >= 0]] = True
        return values + 0.5 * named


class GradedPredictions:
    """Answers as ``TracePredictions``, with values that are chances, as those of a calibrated router are.

    Each expert has a draw from a normal distribution, whose mean is shifted where the row picks it. The value is the
    chance of a pick given that draw. The shift is such that the top-k of the values have the given ``recall``.
    """

    def __init__(self, catalogue: Catalogue, recall: float, seed: int = 0) -> None:
        """Raises InvalidConfig for a recall that is not above 0 and below 1."""
        if not 0 < recall < 1:
            raise InvalidConfig("recall", recall, "above 0 and below 1")
        self._catalogue = catalogue
        self._random = np.random.default_rng(seed)
        self._recall = recall
        self._shifts: dict[tuple[int, int], float] = {}  # by top-k and experts of a layer

    def answer(self, request: PredictionRequest, picks: NDArray[np.integer]) -> Prediction:
        """``picks[T, layers, k]``: the step's. The answer's values are ``[T, M]``."""
        values = [self._layer(layer, picks[:, layer]) for layer in range(*request.layers)]
        return Prediction(request, "trace", np.concatenate(values, axis=1).astype(np.float32))

    def _layer(self, layer: int, picks: NDArray[np.integer]) -> NDArray[np.float64]:
        experts, top_k = int(self._catalogue.experts_per_layer[layer]), int(self._catalogue.top_k[layer])
        if top_k not in range(1, experts):
            return np.full((len(picks), experts), top_k / experts)
        shift = self._shift(top_k, experts)
        draws = self._random.normal(size=(len(picks), experts))
        rows, places = np.nonzero(picks < experts)
        draws[rows, picks[rows, places]] += shift
        logits = shift * draws - shift * shift / 2 + np.log(top_k / (experts - top_k))
        chances: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
        return chances

    def _shift(self, top_k: int, experts: int) -> float:
        if (top_k, experts) not in self._shifts:
            draws = np.random.default_rng(0).normal(size=(_DRAWN, experts))
            low, high = 0.0, _MOST_SHIFT
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                shifted = draws.copy()
                shifted[:, :top_k] += middle
                named = np.argpartition(-shifted, top_k - 1, axis=1)[:, :top_k]
                low, high = (middle, high) if (named < top_k).mean() < self._recall else (low, middle)
            self._shifts[top_k, experts] = (low + high) / 2
        return self._shifts[top_k, experts]


class KnownPaths(TokenPaths):
    """Foretells what the trace has: what a perfect predictor would be worth (``paths-known``)."""

    version = "known"

    def __init__(self, policy: ExpertPolicy, trace: RoutingTrace) -> None:
        self._catalogue = policy.catalogue
        self._trace = trace

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        picks = self._trace.experts[self._trace.seq_starts[sequences] + positions]
        found: Scores = np.zeros((len(picks), self._catalogue.size), dtype=np.float32)
        rows, layers, places = np.nonzero(picks < self._catalogue.experts_per_layer[:, None])
        found[rows, self._catalogue.first[layers] + picks[rows, layers, places]] = 1
        return found

    def end(self, sequence: int) -> None:
        pass
