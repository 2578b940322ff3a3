"""The picks of the step that has just run, for what foretells routing paths."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.events import SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue

Picks = NDArray[np.int64]


class StepPicks:
    """Hears of routing (``ExpertEngine.also_tell``) and keeps one step's. All calls come from one thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._layers = catalogue.layers
        self._width = max(1, int(catalogue.top_k.max()))
        self._none = int(catalogue.experts_per_layer.max())
        self._seen: dict[int, NDArray[np.integer]] = {}
        self._step: Picks | None = None

    def take(self) -> Picks | None:
        """``[T, layers, k]``: of the last step's rows, in its order; no expert's index stands for no pick. None: it
        failed, or was not heard of whole.
        """
        step, self._step = self._step, None
        return step

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        """Nothing: only picks are kept."""

    def sequence_preempted(self, sequence: int) -> None:
        """Nothing: only picks are kept."""

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        self._seen[layer] = picks.copy()

    def step_ended(self, step: Step, *, failed: bool) -> None:
        seen, self._seen = self._seen, {}
        self._step = None
        if failed or len(seen) != self._layers:
            return
        found = np.full((step.rows, self._layers, self._width), self._none, dtype=np.int64)
        for layer, picks in seen.items():
            found[:, layer, : picks.shape[1]] = picks
        self._step = found

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        """Nothing: only picks are kept."""
