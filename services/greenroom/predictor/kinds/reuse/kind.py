"""The kind ``reuse``: the coefficients that the policy `reuse` predicts by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.fitted_to_picks import FittedToPicks

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace


class ReuseKind(FittedToPicks[ReuseFile]):
    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(ReuseFile, config)

    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> ReuseFile:
        from greenroom.predictor.kinds.reuse.fit import FitOptions, fit

        return fit(trace, FitOptions(seed=seed, seconds=seconds))
