"""What the kinds have in common that are fitted to whole sequences' picks, as a trace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.predictor.kinds.artifact_files import ArtifactFileKind
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.pace import EveryMany
from greenroom.predictor.traces.counts import Picks
from greenroom.predictor.traces.samples import Kept

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace

F = TypeVar("F", bound=ArtifactFile)


class FittedToPicks(ArtifactFileKind[F]):
    """Made after so many sequences, and anew after more."""

    def __init__(self, file: type[F], config: BuildingConfig) -> None:
        super().__init__(file)
        self._config = config

    @property
    def keeps(self) -> str:
        return "picks and tokens" if self.keeps_tokens else "picks"

    @abstractmethod
    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> F:
        """``seconds``: in which it is to be done, with what was learnt by then. Raises InvalidConfig, TraceError."""

    def keep(self, picks: Picks, experts: int) -> Kept | None:
        """[rows, layers, k], as they are; None where a row picks an expert twice."""
        ordered = np.sort(picks, axis=2)
        if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] < experts)).any():
            return None
        return picks.copy()  # what came off the wire is a view of the whole record

    def pace(self, made: bool) -> EveryMany:
        return EveryMany(self._config.reuse_after, self._config.reuse_again, made)

    def options(self) -> Mapping[str, Any]:
        return {"seed": self._config.seed, "seconds": self._config.timeout_s / 2}

    def make(self, job: Job) -> F:
        """Raises InvalidConfig, TraceError."""
        return self.fit(trace_of_job(job), seed=int(job.options["seed"]), seconds=float(job.options["seconds"]))


def trace_of_job(job: Job) -> RoutingTrace:
    """The samples as one trace; with tokens it tells prompts and answers apart. Raises TraceError."""
    from greenroom.policies.base.events import Phase
    from greenroom.replay.traces.routing_trace import RoutingTrace

    picks = [one.array for one in job.samples]
    starts = np.concatenate(([0], np.cumsum([len(one) for one in picks]))).astype(np.int64)
    trace = RoutingTrace(np.concatenate(picks), starts, num_experts=job.shape.experts, model=job.model)
    tokens = [one.tokens for one in job.samples if one.tokens is not None]
    if not tokens:
        return trace
    prompts = np.repeat([one.prompt_rows for one in job.samples], np.diff(starts))
    places = np.arange(trace.tokens) - np.repeat(starts[:-1], np.diff(starts))
    phases = np.where(places < prompts, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    return replace(trace, token=np.concatenate(tokens).astype(np.int64), phase=phases)
