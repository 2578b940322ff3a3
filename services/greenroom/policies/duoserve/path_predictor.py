"""The kind of prediction ``path``: what each decoding row's picks so far say of its next ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.events import LayerRouting, Phase, Prediction, PredictionRequest, Step
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.duoserve.path_weights import PATH, PathLogits, PathWeights


class PathPredictor(PicksPredictor):
    """Values are logits ``[T, M]`` for the decoding rows of the step, in their order. Prompt rows are not asked about.

    Without weights it does not answer.
    """

    kind = PATH

    def __init__(self) -> None:
        self._weights: PathWeights | None = None
        self._version = ""
        self._rows: NDArray[np.intp] | None = None  # those that decode; None: all of them
        self._logits: PathLogits | None = None
        self._layer = -1

    def use(self, weights: PathWeights, version: str) -> None:
        """Predict by these weights from the next step on."""
        self._weights, self._version, self._logits = weights, version, None

    def on_step_started(self, step: Step) -> None:
        decodes = step.row_phases == Phase.DECODE
        count = int(np.count_nonzero(decodes))
        self._rows = None if count == step.rows else np.flatnonzero(decodes)
        self._logits = PathLogits(self._weights, count) if self._weights is not None and count else None

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._layer = routing.layer
        if self._logits is None:
            return
        if routing.picks is None or len(routing.picks) != routing.step.rows:
            self._logits = None  # which row picked what is not known
            return
        self._logits.add(routing.layer, routing.picks if self._rows is None else routing.picks[self._rows])

    def answer(self, request: PredictionRequest) -> Prediction | None:
        if self._logits is None:
            return None
        parts = [self._logits.of(layer, layer - self._layer) for layer in range(*request.layers)]
        return Prediction(request, self._version, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))
