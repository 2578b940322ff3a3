"""The kind ``paths``: the tables, or the T5, by which the policy `expertflow` foretells picks from tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import TABLES
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.fitted_to_picks import FittedToPicks
from greenroom.predictor.making.job import Job

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace


class PathsKind(FittedToPicks[PathsFile]):
    """Made of sequences whose workers tell their tokens. Makes its own coefficients of ``reuse`` first."""

    keeps_tokens: ClassVar[bool] = True
    extra: ClassVar[str] = "torch"

    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(PathsFile, config)

    @property
    def lacking(self) -> str | None:
        wanted = () if self._config.paths_form == TABLES else ("torch", "transformers")
        return next((name for name in wanted if importlib.util.find_spec(name) is None), None)

    def options(self) -> Mapping[str, Any]:
        return {**super().options(), "form": self._config.paths_form, "least_sequences": self._config.paths_shared_by}

    def make(self, job: Job) -> PathsFile:
        form, shared_by = str(job.options["form"]), int(job.options["least_sequences"])
        asked = PathsKind(replace(self._config, paths_form=form, paths_shared_by=shared_by))
        return super(PathsKind, asked).make(job)

    def fit(self, trace: RoutingTrace, *, seed: int, seconds: float) -> PathsFile:
        from greenroom.predictor.kinds.paths.fit import REUSE_SHARE, FitOptions
        from greenroom.predictor.kinds.paths.forms import fit_form
        from greenroom.predictor.kinds.reuse.fit import FitOptions as ReuseOptions
        from greenroom.predictor.kinds.reuse.fit import fit as fit_reuse

        own, rest = REUSE_SHARE * seconds, (1 - REUSE_SHARE) * seconds
        reuse = fit_reuse(trace, ReuseOptions(seed=seed, seconds=own))
        options = FitOptions(seed=seed, seconds=rest, least_sequences=self._config.paths_shared_by)
        return fit_form(self._config.paths_form, trace, reuse, options)
