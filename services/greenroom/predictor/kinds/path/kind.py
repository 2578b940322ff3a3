"""The kind ``path``: the weights that the policy `duoserve` predicts by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from greenroom.core.artifacts.path_file import PathFile
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.fitted_to_picks import FittedToPicks

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace

_REUSE_SHARE: Final = 0.25
"""Of the time, for the coefficients."""


class PathKind(FittedToPicks[PathFile]):
    """Makes its own coefficients of ``reuse`` first."""

    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(PathFile, config)

    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> PathFile:
        from greenroom.predictor.kinds.path.fit import FitOptions, fit
        from greenroom.predictor.kinds.reuse.fit import FitOptions as ReuseOptions
        from greenroom.predictor.kinds.reuse.fit import fit as fit_reuse

        own, rest = _REUSE_SHARE * seconds, (1 - _REUSE_SHARE) * seconds
        return fit(trace, fit_reuse(trace, ReuseOptions(seed=seed, seconds=own)), FitOptions(seed=seed, seconds=rest))
