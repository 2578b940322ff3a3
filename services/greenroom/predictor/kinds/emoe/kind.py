"""The kinds ``emoe-a`` and ``emoe-l``: eMoE's learned predictors (section 3.2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from greenroom.core.tensors import Damaged
from greenroom.predictor.judging.gate import why_withheld
from greenroom.predictor.kinds.config import LEAST_SEQUENCES, LearningConfig
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact, codec_of
from greenroom.predictor.kinds.emoe.config import TrainingConfig
from greenroom.predictor.kinds.emoe.sequences import stack
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.kind import ForecastKind, History
from greenroom.predictor.making.pace import EveryMany
from greenroom.predictor.traces.counts import Picks, Shape, count_slots
from greenroom.predictor.traces.samples import Kept

if TYPE_CHECKING:
    from greenroom.predictor.kinds.emoe.networks import LearnedPredictor


class EmoeKind(ForecastKind[LearnedArtifact]):
    """After a restart it is learnt anew when ``again`` sequences have come, not ``after``: what was learnt from many
    does not give way to what was learnt from few."""

    needs = ("torch", "transformers")
    extra = "torch"
    least_sequences = LEAST_SEQUENCES

    def __init__(self, name: str, config: LearningConfig) -> None:
        self.codec = codec_of(name)
        self.usual_sequences = config.after
        self._config = config
        self._training = TrainingConfig(kind=name, backbone=config.backbone, seed=config.seed)

    @property
    def keeps(self) -> str:
        return "counts by slot"

    def keep(self, picks: Picks, experts: int) -> Kept:
        """[1, layers, k, experts]: tokens by slot and expert."""
        return count_slots(picks, experts)[None]

    def pace(self, made: bool) -> EveryMany:
        """``usual_sequences`` says when the first one is made."""
        after, again = self._config.after, self._config.again
        return EveryMany(1, again, made, retry_after=min(after, again))

    def options(self) -> Mapping[str, Any]:
        return asdict(self._training)

    def earlier(self, history: History[LearnedArtifact], sequences: int) -> LearnedArtifact | None:
        """What is served, to be measured on the same prompts. Not where it was learnt from some of them: it would look
        better than it is."""
        return history.served if history.unseen >= round(sequences * self._training.test_share) else None

    def make(self, job: Job) -> LearnedArtifact:
        from greenroom.predictor.kinds.emoe.training import train

        served = self.codec.load(job.earlier) if job.earlier else None
        return train(stack(job.samples), TrainingConfig(**job.options), model=job.model, served=served)

    def judged(self, artifact: LearnedArtifact) -> LearnedArtifact:
        return artifact.withheld_for(why_withheld(artifact.report, self._config.tolerance))

    def load(self, artifact: LearnedArtifact) -> LearnedPredictor:
        from greenroom.predictor.kinds.emoe.networks import LearnedPredictor

        predictor = LearnedPredictor(artifact)
        if not np.isfinite(predictor.forecast("", None)).all():  # the first one takes longest, too
            raise Damaged("what it forecasts are no numbers")
        return predictor

    def shape(self, artifact: LearnedArtifact) -> Shape:
        return artifact.shape
