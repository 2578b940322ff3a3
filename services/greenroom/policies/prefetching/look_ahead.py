"""Look-ahead: prefetches what the next layers' routers would probably pick for this layer's rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Keys, Scores
from greenroom.policies.base.events import ROUTER, LayerRouting, Prediction, PredictionRequest, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.prefetching.prefetching_policy import PrefetchingPolicy
from greenroom.policies.replacement.next_use import NextUse

Bins = NDArray[np.intp]

_MARGIN = 2.5
"""Under ``next-use`` a prefetch must be worth this many times its victim: a slot is taken early, and for a guess."""

_ROWS = 32
"""Rows of a step that calibration uses: a few tell as much as all rows of a long prompt."""


class LookAhead(PrefetchingPolicy):
    """Prefetches what the routers of the next ``layers`` layers would probably pick for the rows of this one.

    It has the effect of Pre-gated MoE (Hwang et al., ISCA 2024) without retraining: at every layer it requests a
    prediction from the provider ``router``. ``Calibration`` learns which chance each predicted weight stands for. An
    expert is wanted where the chance that some row picks it is at least ``least``, the nearer layer first, then the
    likelier expert. ``per_row`` limits each row to that many candidates (None: no limit). Prefetches for a layer that
    still wait when it is routed are withdrawn. Without predictions the policy is its ``retention``.
    """

    asks = frozenset({ROUTER})

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        layers: int = 2,
        least: float = 0.7,
        per_row: int | None = None,
        retention: str = "next-use",
        evict: bool = True,
    ) -> None:
        """Raises InvalidConfig for values out of range, UnknownName for an unknown retention."""
        if layers < 1:
            raise InvalidConfig("layers", layers, "at least 1")
        if not 0 < least <= 1:
            raise InvalidConfig("least", least, "above 0, at most 1")
        if per_row is not None and per_row < 1:
            raise InvalidConfig("per_row", per_row, "at least 1")
        super().__init__(catalogue, retention=retention, evict=evict)
        self._layers = layers
        self._least = least
        self._per_row = per_row
        self._calibration = Calibration(layers)
        self._foreseen: dict[int, list[tuple[int, Bins]]] = {}  # by layer: (layers ahead, bins [T, experts])
        self._priority: Scores = np.zeros(catalogue.size, dtype=np.float32)
        self._layer = -1
        self._asked: PredictionRequest | None = None

    def on_step_started(self, step: Step) -> None:
        self._asked = None
        self._foreseen.clear()
        if isinstance(self.retention, NextUse):
            self.retention.expect_nothing()
        if self._wants_any:
            self._want(np.zeros_like(self._priority))

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        layer = self._layer = routing.layer
        self._asked = None
        for ahead, bins in self._foreseen.pop(layer, ()):
            if routing.picks is not None:
                self._calibration.learn(ahead, bins, routing.picks)
        self._passed(layer)
        last = min(layer + 1 + self._layers, self.catalogue.layers)
        if layer + 1 < last:
            self._asked = PredictionRequest(ROUTER, (layer + 1, last), step=routing.step.number)
            self._ask(self._asked)

    def on_prediction(self, prediction: Prediction) -> None:
        if prediction.request is not self._asked:
            return  # late, or the answer to another request
        self._asked = None
        start, stop = prediction.request.layers
        spans = self.catalogue.spans
        span = slice(spans[start].start, spans[stop - 1].stop)
        ahead = self.catalogue.layer_of[span] - self._layer
        values = prediction.values.reshape(-1, prediction.values.shape[-1])
        bins = self._calibration.bins(values)
        chances = self._calibration.chances(ahead, bins)
        for layer in range(start, stop):
            own = slice(spans[layer].start - span.start, spans[layer].stop - span.start)
            self._foreseen.setdefault(layer, []).append((layer - self._layer, bins[:_ROWS, own]))
            if self._per_row is not None and self._per_row < own.stop - own.start:
                bound = np.partition(values[:, own], -self._per_row, axis=1)[:, -self._per_row, None]
                chances[:, own][values[:, own] < bound] = 0
        chance = chances[0] if len(chances) == 1 else 1 - np.prod(1 - chances, axis=0)
        if isinstance(self.retention, NextUse):
            self.retention.expect(span, chance)
        self._foreseen_chance(span, ahead, chance)

    def _passed(self, layer: int) -> None:
        """Withdraw what was wanted for this layer and those before it."""
        if self._wants_any:
            stop = self.catalogue.first[layer + 1]
            if self._priority[:stop].any():
                priority = self._priority.copy()
                priority[:stop] = 0
                self._want(priority)

    def _foreseen_chance(self, span: slice, ahead: Counts, chance: NDArray[np.float64]) -> None:
        """Want by the routers' chances for the keys of ``span``, whose layers are ``ahead[M]`` layers ahead."""
        priority = np.zeros_like(self._priority)
        priority[span] = (chance >= self._least) * (self._layers - ahead + chance)
        self._want(priority)

    def _worthier(self, incoming: Keys, worth: Worth, victim: float) -> bool:
        return not isinstance(self.retention, NextUse) or bool((worth[incoming] > _MARGIN * victim).all())

    def _want(self, priority: Scores) -> None:
        self._priority = priority
        self._publish(priority)


class Calibration:
    """How often an expert of a certain predicted weight is really picked, by the number of layers ahead.

    Weights from 0 to 1 are counted in equal bins. Before any were seen, a weight stands for the chance itself.
    """

    def __init__(self, layers: int, *, bins: int = 20, prior: float = 4.0) -> None:
        self._bins = bins
        centres = (np.arange(bins) + 0.5) / bins
        self._seen: NDArray[np.float64] = np.full((layers, bins), prior)
        self._picked: NDArray[np.float64] = np.tile(prior * centres, (layers, 1))
        self._chance: NDArray[np.float64] = self._picked / self._seen

    def bins(self, weights: Scores) -> Bins:
        """The bin of each weight; NaN counts as 0."""
        within = np.fmin(np.fmax(weights, 0), 1)
        return np.minimum((within * self._bins).astype(np.intp), self._bins - 1)

    def chances(self, ahead: int | Counts, bins: Bins) -> NDArray[np.float64]:
        """``[T, M]``: the chance that a row picks the expert, for ``bins[T, M]`` of routers run ``ahead`` layers early.

        ``ahead``: one number for all experts, or one for each of the M.
        """
        chances: NDArray[np.float64] = self._chance[ahead - 1, bins]
        return chances

    def learn(self, ahead: int, bins: Bins, picks: NDArray[np.integer]) -> None:
        """Compare ``picks[T, k]`` with what was predicted, ``bins[T', experts]`` of the first T' ≤ T rows."""
        experts = bins.shape[1]
        picks = picks[: len(bins)]
        if len(picks) < len(bins):
            return
        rows, places = np.nonzero(picks < experts)
        own = bins[rows, picks[rows, places]]
        self._seen[ahead - 1] += np.bincount(bins.ravel(), minlength=self._bins)
        self._picked[ahead - 1] += np.bincount(own, minlength=self._bins)
        self._chance[ahead - 1] = self._picked[ahead - 1] / self._seen[ahead - 1]
