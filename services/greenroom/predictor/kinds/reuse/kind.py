"""The kind ``reuse``: the coefficients that the policy `reuse` predicts by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.artifact_files import ArtifactFileKind
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.pace import EveryMany
from greenroom.predictor.traces.counts import Picks
from greenroom.predictor.traces.samples import Kept


class ReuseKind(ArtifactFileKind[ReuseFile]):
    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(ReuseFile)
        self._config = config

    def keep(self, picks: Picks, experts: int) -> Kept | None:
        """[rows, layers, k], as they are; None where a row picks an expert twice."""
        ordered = np.sort(picks, axis=2)
        if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] < experts)).any():
            return None
        return picks.copy()  # what came off the wire is a view of the whole record

    def pace(self, made: bool) -> EveryMany:
        return EveryMany(self._config.reuse_after, self._config.reuse_again, made)

    def options(self) -> Mapping[str, Any]:
        return {"seed": self._config.seed}

    def make(self, job: Job) -> ReuseFile:
        """Raises InvalidConfig, TraceError."""
        from greenroom.predictor.kinds.reuse.fit import FitOptions, fit
        from greenroom.replay.traces.routing_trace import RoutingTrace

        picks = [one.array for one in job.samples]
        starts = np.concatenate(([0], np.cumsum([len(one) for one in picks]))).astype(np.int64)
        trace = RoutingTrace(np.concatenate(picks), starts, num_experts=job.shape.experts, model=job.model)
        return fit(trace, FitOptions(seed=int(job.options["seed"])))
