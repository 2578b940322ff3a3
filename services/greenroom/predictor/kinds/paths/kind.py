"""The kind ``paths``: the tables by which the policy `expertflow` foretells picks from tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.fitted_to_picks import FittedToPicks

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace


class PathsKind(FittedToPicks[PathsFile]):
    """Made of sequences whose workers tell their tokens. Makes its own coefficients of ``reuse`` first."""

    keeps_tokens: ClassVar[bool] = True

    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(PathsFile, config)

    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> PathsFile:
        from greenroom.predictor.kinds.paths.fit import REUSE_SHARE, FitOptions, fit
        from greenroom.predictor.kinds.reuse.fit import FitOptions as ReuseOptions
        from greenroom.predictor.kinds.reuse.fit import fit as fit_reuse

        own, rest = REUSE_SHARE * seconds, (1 - REUSE_SHARE) * seconds
        return fit(trace, fit_reuse(trace, ReuseOptions(seed=seed, seconds=own)), FitOptions(seed=seed, seconds=rest))
