"""The task type by a linear head on a prompt's features."""

from __future__ import annotations

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype.extractor import UNKNOWN, Extraction
from greenroom.tasktype.linear.features import PromptFeatures
from greenroom.tasktype.linear.head import most_probable, probabilities
from greenroom.tasktype.linear.weights import Weights


class LinearExtractor:
    """The most probable type, or ``unknown`` where that is less sure than the weights' least probability.

    Scores of an extraction are the types' probabilities, calibrated on data sets that nothing was learnt from.
    Raises InvalidConfig where the weights are for other features.
    """

    def __init__(self, weights: Weights, features: PromptFeatures, name: str = "linear") -> None:
        if weights.features != features.name:
            raise InvalidConfig("weights, at $.features", weights.features, f"the extractor {name} has {features.name}")
        self.name = name
        self.names = weights.names
        self._least = weights.least_probability
        self._features = features
        self._row_of = {feature: row for row, feature in enumerate(weights.weights)}
        steps = np.array(list(weights.weights.values()), dtype=np.float32)
        self._rows = (steps * (weights.scale / weights.temperature)).astype(np.float32)
        self._bias = (np.array(weights.bias) / weights.temperature).astype(np.float32)

    def extract(self, prompt: str) -> Extraction:
        found = [
            (row, value)
            for feature, value in self._features(prompt).items()
            if (row := self._row_of.get(feature)) is not None
        ]
        scores = self._bias
        if found:
            rows, values = zip(*found, strict=True)
            scores = scores + np.array(values, dtype=np.float32) @ self._rows[list(rows)]
        shares = probabilities(scores[None, :])
        [best], [sure] = most_probable(shares, len(self.names))
        return Extraction(
            task_type=self.names[best] if sure >= self._least else UNKNOWN,
            scores=dict(zip(self.names, shares[0, : len(self.names)].tolist(), strict=True)),
        )
