"""What is served of a model, and forecasts from it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from greenroom.core.errors import InvalidRequest
from greenroom.predictor.kinds.statistics.forecaster import Forecaster, parse_previous, uniform
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.traces.counts import Floats


class Source(StrEnum):
    """What a forecast was made from, as callers are told."""

    TASK_TYPE = "task type"
    PREVIOUS = "previous prompt"
    ALL_TASKS = "all tasks"
    UNIFORM = "uniform"
    EMOE_A = "learned emoe-a"
    EMOE_L = "learned emoe-l"


LEARNED_SOURCES = {"emoe-a": Source.EMOE_A, "emoe-l": Source.EMOE_L}


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """``distribution``: float32[layers, experts], every row sums to 1; of no layers where not even the model's shape
    is known. ``version``: of what it was made from, 0 where nothing is served. ``sequences``: that it rests on."""

    source: Source
    distribution: Floats
    version: int = 0
    sequences: int = 0


@dataclass(eq=False)
class Served:
    """One version, ready to forecast from."""

    snapshot: Snapshot
    _forecasters: dict[str | None, Forecaster] = field(default_factory=dict)

    def forecast(self, task_type: str, previous: bytes) -> Forecast:
        """Of the task type; where nothing is known of it, of all tasks; where nothing is known at all, uniform.

        With a ``previous`` prompt's distribution: through the affinity of the task type, else of all tasks. Raises
        InvalidRequest.
        """
        snapshot = self.snapshot
        statistics = snapshot.tasks.get(task_type)
        known = None if statistics is None else task_type
        if statistics is None:
            statistics = snapshot.everything
        given = parse_previous(previous, snapshot.shape) if previous else None
        if not statistics.sequences:
            return Forecast(Source.UNIFORM, uniform(snapshot.shape), snapshot.version)
        forecaster = self._forecasters.get(known)
        if forecaster is None:
            forecaster = self._forecasters[known] = Forecaster(statistics)
        if given is not None:
            source, distribution = Source.PREVIOUS, forecaster.after(given)
        else:
            source = Source.ALL_TASKS if known is None else Source.TASK_TYPE
            distribution = forecaster.popularity
        return Forecast(source, distribution, snapshot.version, statistics.sequences)


@dataclass(eq=False)
class Showcase:
    """What is served of each model."""

    models: dict[str, Served] = field(default_factory=dict)

    def forecast(self, model: str, task_type: str, previous: bytes) -> Forecast:
        """Raises InvalidRequest."""
        if not model:
            raise InvalidRequest("model must name one", param="model")
        served = self.models.get(model)
        if served is None:
            return Forecast(Source.UNIFORM, np.empty((0, 0), np.float32))
        return served.forecast(task_type, previous)
