"""The kind ``reuse``: the coefficients that the policy `reuse` predicts by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.artifact_files import ArtifactFileKind
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.recorded_picks import distinct_picks, trace_of
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.pace import EveryMany
from greenroom.predictor.traces.counts import Picks
from greenroom.predictor.traces.samples import Kept


class ReuseKind(ArtifactFileKind[ReuseFile]):
    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(ReuseFile)
        self._config = config

    def keep(self, picks: Picks, experts: int) -> Kept | None:
        return distinct_picks(picks, experts)

    def pace(self, made: bool) -> EveryMany:
        return EveryMany(self._config.reuse_after, self._config.reuse_again, made)

    def options(self) -> Mapping[str, Any]:
        return {"seed": self._config.seed}

    def make(self, job: Job) -> ReuseFile:
        """Raises InvalidConfig, TraceError."""
        from greenroom.predictor.kinds.reuse.fit import FitOptions, fit

        return fit(trace_of(job), FitOptions(seed=int(job.options["seed"])))
