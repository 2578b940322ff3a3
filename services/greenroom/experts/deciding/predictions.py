"""Requests of a policy for predictions, and the predictors that answer from picks alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.policies.base.events import Artifact, LayerRouting, Prediction, PredictionRequest, Step
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.picks_predictor import PicksPredictor


class Predictions:
    """Hands requests to providers: to ``predictors`` once a layer's fetches are queued, to others (a router run
    ahead) when they ask. ``asks``: the kinds that the policy may request, none where nothing is to be foreseen.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        predictors: Sequence[PicksPredictor],
        prefetcher: Prefetcher,
        asks: Collection[str],
    ) -> None:
        self._policy = policy
        self._prefetcher = prefetcher
        self._asks = asks
        self._given = predictors
        self._predictors = [predictor for predictor in predictors if predictor.kind in asks]
        self._late = [each for each in self._predictors if type(each).poll is not PicksPredictor.poll]
        self._requests: dict[str, PredictionRequest] = {}  # by kind, the newest that no provider has taken
        self._at_once: set[str] = set()

    def answers_at_once(self, kind: str) -> None:
        """Requests of this kind are answered as soon as the layer has been entered, before any of its experts runs."""
        self._at_once.add(kind)
        self._policy.answered_at_once |= {kind}

    def take_request(self, kind: str) -> PredictionRequest | None:
        """The newest request of this kind, once."""
        self._collect()
        return self._requests.pop(kind, None)

    def _collect(self) -> None:
        for request in self._policy.take_requests() if self._asks else ():
            self._requests[request.kind] = request

    def answered(self, prediction: Prediction) -> None:
        """A provider has answered."""
        self._policy.on_prediction(prediction)
        self.decided()

    def decided(self) -> None:
        """Fetch what the policy wants, unless an answer that it wants to know first comes at once."""
        if self._at_once:
            self._collect()
            if not self._at_once.isdisjoint(self._requests):
                return
        self._prefetcher.pump()

    def prepare(self, artifact: Artifact) -> Artifact:
        """See PicksPredictor.prepare."""
        for predictor in self._given:
            artifact = predictor.prepare(artifact)
        return artifact

    def swapped(self, artifact: Artifact) -> None:
        """To be called between steps."""
        for predictor in self._predictors:
            predictor.on_artifact_swapped(artifact)

    def step_started(self, step: Step) -> None:
        for predictor in self._predictors:
            predictor.on_step_started(step)

    def layer_routed(self, routing: LayerRouting) -> None:
        """To be called once the layer's own fetches are queued."""
        for predictor in self._predictors:
            predictor.on_layer_routed(routing)
            request = self.take_request(predictor.kind)
            if request is not None and (prediction := predictor.answer(request)) is not None:
                self.answered(prediction)

    def poll(self) -> None:
        """Pass on what predictors have answered since they were asked."""
        for predictor in self._late:
            if (prediction := predictor.poll()) is not None:
                self.answered(prediction)
