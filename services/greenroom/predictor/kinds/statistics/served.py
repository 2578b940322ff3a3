"""One version of statistics, ready to forecast from. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from greenroom.predictor.kinds.statistics.forecaster import Forecaster, parse_previous, uniform
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.traces.counts import Floats


class Source(StrEnum):
    """What of the statistics a forecast was made from, as callers are told."""

    TASK_TYPE = "task type"
    PREVIOUS = "previous prompt"
    ALL_TASKS = "all tasks"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """``source``: what it was made from, a Source or ``learned KIND``. ``distribution``: float32[layers, experts],
    every row sums to 1; of no layers where not even the model's shape is known. ``version``: of what it was made from,
    0 where nothing is served. ``sequences``: that it rests on."""

    source: str
    distribution: Floats
    version: int = 0
    sequences: int = 0


@dataclass(eq=False)
class Served:
    """One version of a model."""

    snapshot: Snapshot
    _forecasters: dict[str | None, Forecaster] = field(default_factory=dict)

    def forecast(self, task_type: str, previous: bytes) -> Forecast:
        """Of the task type. Where nothing is known of it, of all task types; where nothing is known at all, uniform.

        ``previous``: the previous prompt's distribution, or b"". With it, through the affinity of the task type, else
        of all task types. Raises InvalidRequest.
        """
        snapshot = self.snapshot
        statistics = snapshot.tasks.get(task_type)
        known = None if statistics is None else task_type
        if statistics is None:
            statistics = snapshot.everything
        given = parse_previous(previous, snapshot.shape) if previous else None
        if not statistics.sequences:
            return Forecast(Source.UNIFORM.value, uniform(snapshot.shape), snapshot.version)
        forecaster = self._forecasters.get(known)
        if forecaster is None:
            forecaster = self._forecasters[known] = Forecaster(statistics)
        if given is not None:
            source, distribution = Source.PREVIOUS, forecaster.after(given)
        else:
            source = Source.ALL_TASKS if known is None else Source.TASK_TYPE
            distribution = forecaster.popularity
        return Forecast(source.value, distribution, snapshot.version, statistics.sequences)
