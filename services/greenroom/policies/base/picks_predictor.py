"""Predictors that foresee a step's next picks from those that it has made, and need nothing else of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from greenroom.policies.base.events import Artifact, LayerRouting, Prediction, PredictionRequest, Step


class PicksPredictor(ABC):
    """Answers a policy's requests of one ``kind``. The engine runs it, so a replay of recorded routing has it too.

    In order: ``on_step_started``; for each layer ``on_layer_routed``, once the layer's own fetches are queued, and then
    ``answer`` where the policy has asked; ``poll`` as the layer's experts run, and when the next layer is entered. All
    calls but ``prepare`` come from the engine's thread, and none waits.
    """

    kind: ClassVar[str]

    def prepare(self, artifact: Artifact) -> Artifact:
        """As ``ExpertPolicy.prepare``. Raises InvalidConfig for an artifact that can not be predicted by."""
        return artifact

    def on_artifact_swapped(self, artifact: Artifact) -> None:  # noqa: B027 - most have none
        """From the next step on it predicts by this version. Ignores artifacts that it does not take."""

    @abstractmethod
    def on_step_started(self, step: Step) -> None:
        """A forward begins."""

    @abstractmethod
    def on_layer_routed(self, routing: LayerRouting) -> None:
        """The layer's picks are known."""

    @abstractmethod
    def answer(self, request: PredictionRequest) -> Prediction | None:
        """None: there is nothing to say, or ``poll`` will say it."""

    def poll(self) -> Prediction | None:
        """An answer that has arrived since, if one has."""
        return None
