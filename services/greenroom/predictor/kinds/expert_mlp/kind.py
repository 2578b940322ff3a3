"""The kind ``expert_mlp``: DuoServe-MoE's printed predictor, one layer ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.fitted_to_picks import FittedToPicks

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace

SAMPLES: Final = 100_000
"""More take longer than one making may on a busy processor."""


class ExpertMlpKind(FittedToPicks[ExpertMlpFile]):
    needs = ("torch",)
    extra = "torch"

    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(ExpertMlpFile, config)

    # What it takes is bounded by its samples, whatever ``seconds`` says.
    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> ExpertMlpFile:
        from greenroom.predictor.kinds.expert_mlp.training import TrainingOptions, train

        return train(trace, TrainingOptions(samples=SAMPLES, seed=seed))
