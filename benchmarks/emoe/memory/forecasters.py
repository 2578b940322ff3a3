"""Predictors for the memory figures: trained on routing recorded before, asked once in so many prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.predictor.kinds.emoe.config import TrainingConfig
from greenroom.predictor.kinds.emoe.networks import LearnedPredictor
from greenroom.predictor.kinds.emoe.recorded import Recorded
from greenroom.predictor.kinds.emoe.training import train
from greenroom.worker.generation_engine import RecordedRouting
from greenroom.worker.predictions.last_prompts import LastPrompts

EVERY = 40
"""Prompts between two forecasts; eMoE, section 3.3."""


class Predictor(Protocol):
    def forecast(self, task_type: str, previous: NDArray[np.float32] | None) -> NDArray[np.float32]: ...


def learn(recorded: Recorded, kind: str, epochs: int) -> LearnedPredictor:
    """On one thread: so small a network is slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return LearnedPredictor(train(recorded.sequences, TrainingConfig(kind=kind, epochs=epochs)))
    finally:
        torch.set_num_threads(threads)


@dataclass
class Forecaster:
    """Asks as a worker does: once in ``every`` prompts, after the last finished prompt of each task type that runs and
    is sensitive. ``seconds``: spent on it."""

    predictor: Predictor
    every: int
    profile: ModelProfile
    layers: int
    foresee: Callable[[Prediction], None]
    seconds: float = 0.0
    asked: int = 0
    _prompts: int = 0
    _spared: bool = False
    _last: LastPrompts = field(init=False)

    def __post_init__(self) -> None:
        self._last = LastPrompts(self.profile)

    def finished(self, task: str, routed: RecordedRouting | None) -> None:
        if routed is not None:
            self._last.finished(task, routed)

    def prompt_begun(self, running: Sequence[str]) -> None:
        """``running``: the task types that run now, with this prompt's own."""
        due = self._spared or self._prompts % self.every == 0
        self._prompts += 1
        if not due:
            return
        began = time.perf_counter()
        sensitive = [task for task in dict.fromkeys(running) if self.profile.insensitive_layers(task) < self.layers]
        self._spared = not sensitive
        for task in sensitive:
            self._ask(task)
        self.seconds += time.perf_counter() - began

    def _ask(self, task: str) -> None:
        known = self._last.of(task)
        previous = np.frombuffer(known, dtype="<f4").reshape(self.layers, -1) if known else None
        values = np.ascontiguousarray(self.predictor.forecast(task, previous)).astype(np.float32).ravel()
        request = PredictionRequest(POPULARITY, (0, self.layers), task=task)
        self.foresee(Prediction(request, "bench", values))
        self.asked += 1


Predictors = Mapping[str, Predictor]
