"""The kind of prediction ``path``: what each decoding row's picks so far say of its next ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.events import LayerRouting, Phase, Prediction, PredictionRequest, Step
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.foresight.path_weights import PATH, PathLogits, PathWeights


class PathPredictor(PicksPredictor):
    """Values are logits ``[T, M]`` for the decoding rows of the step, in their order. Prompt rows are not asked about.

    Without weights it does not answer.
    """

    kind = PATH

    def __init__(self) -> None:
        self._next: PathLogits | None = None  # of the weights in use from the next step on
        self._version = ""
        self._rows: NDArray[np.intp] | None = None  # those that decode; None: all of them
        self._logits: PathLogits | None = None

    def use(self, weights: PathWeights, version: str) -> None:
        """Predict by these weights from the next step on."""
        self._next, self._version, self._logits = PathLogits(weights), version, None

    def on_step_started(self, step: Step) -> None:
        decodes = step.row_phases == Phase.DECODE
        count = int(np.count_nonzero(decodes))
        self._rows = None if count == step.rows else np.flatnonzero(decodes)
        self._logits = self._next if count else None
        if self._logits is not None:
            self._logits.begin(count)

    def answers_at(self, routing: LayerRouting) -> bool:
        """Whether it will answer, if it is asked at this layer."""
        return self._logits is not None and routing.picks is not None and len(routing.picks) == routing.step.rows

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if self._logits is None:
            return
        if routing.picks is None or not self.answers_at(routing):
            self._logits = None  # which row picked what is not known
            return
        self._logits.add(routing.layer, routing.picks if self._rows is None else routing.picks[self._rows])

    def answer(self, request: PredictionRequest) -> Prediction | None:
        if self._logits is None:
            return None
        return Prediction(request, self._version, self._logits.of(*request.layers))
