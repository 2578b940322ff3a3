"""Forecasts from the versions that are served: of a learned predictor where there is one, else of statistics."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Executor
from functools import partial

import numpy as np

from greenroom.core.artifacts.forecast_kinds import STATISTICS
from greenroom.core.errors import InvalidRequest
from greenroom.predictor.kinds.registry import known_kind
from greenroom.predictor.kinds.statistics.forecaster import parse_previous
from greenroom.predictor.kinds.statistics.served import Forecast, Served, Source
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.making.kind import ForecastKind
from greenroom.predictor.making.maker import Maker
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.serving.bounded_thread import BoundedThread, Crowded
from greenroom.predictor.versions.registry import VersionRegistry

_LOG = logging.getLogger(__name__)
_SHARE_OF_DEADLINE = 0.5
"""Of the caller's time that is left, for a learned forecast. The rest is for statistics to answer, and the way back."""


class Forecasts:
    """``learned``: makes the kinds that forecasts are made from."""

    def __init__(
        self,
        statistics: VersionRegistry[Snapshot, Served],
        learned: Maker,
        metrics: PredictorMetrics,
        executor: Executor | None,
        *,
        forecast_s: float,
        max_waiting: int,
    ) -> None:
        """``executor``: the one thread of ``learned``. ``forecast_s``, ``max_waiting``: see LearningConfig."""
        self._statistics = statistics
        self._learned = learned
        self._metrics = metrics
        self._thread = None if executor is None else BoundedThread(executor, max_waiting)
        self._forecast_s = forecast_s
        for source in (*Source, *map(_source, learned.kinds)):
            metrics.forecasts.labels(str(source))
        for kind in learned.kinds:
            for why in ("late", "crowded", "failed"):
                metrics.forgone.labels(kind, why)

    async def forecast(
        self, model: str, task_type: str, previous: bytes, predictor: str = "", within_s: float = math.inf
    ) -> Forecast:
        """By the kind ``predictor``, if that is served of the model and answers in time; else by statistics, see
        Served.forecast. ``within_s``: what is left of the caller's time. Raises InvalidRequest."""
        forecast = None
        if predictor not in ("", STATISTICS):
            kind = known_kind(predictor, "predictor", self._learned.kinds)
            self._learned.asked(model, kind)
            forecast = await self._by_kind(kind, model, task_type, previous, within_s)
        if forecast is None:
            forecast = self._by_statistics(model, task_type, previous)
        self._metrics.forecasts.labels(forecast.source).inc()
        return forecast

    def _by_statistics(self, model: str, task_type: str, previous: bytes) -> Forecast:
        """Raises InvalidRequest."""
        if not model:
            raise InvalidRequest("model must name one", param="model")
        served = self._statistics.served(model)
        if served is None:
            return Forecast(Source.UNIFORM.value, np.empty((0, 0), np.float32))
        return served.prepared.forecast(task_type, previous)

    async def _by_kind(
        self, name: str, model: str, task_type: str, previous: bytes, within_s: float
    ) -> Forecast | None:
        """None where it is not served, is of another shape than the statistics, fails, or is not made in time. Raises
        InvalidRequest."""
        kind, served = self._learned.kinds[name], self._learned.registries[name].served(model)
        if self._thread is None or served is None or served.prepared is None or not isinstance(kind, ForecastKind):
            return None
        artifact, shape, known = served.artifact, kind.shape(served.artifact), self._statistics.served(model)
        if known is not None and known.artifact.shape != shape:
            return None
        given = parse_previous(previous, shape) if previous else None
        work = partial(served.prepared.forecast, task_type, given)
        try:
            found = await self._thread.call(min(self._forecast_s, _SHARE_OF_DEADLINE * within_s), work)
        except Crowded:
            why = "crowded"
        except TimeoutError:
            why = "late"
        except Exception:  # whatever a library raises: statistics answer, and the caller is told that they did
            why = "failed"
            _LOG.exception("version %d of %s of %r made no forecast", artifact.version, name, model)
        else:
            if np.isfinite(found).all():
                return Forecast(_source(name), found, artifact.version, artifact.sequences)
            why = "failed"
            _LOG.error("version %d of %s of %r forecast what are no numbers", artifact.version, name, model)
        self._metrics.forgone.labels(name, why).inc()
        return None


def _source(kind: str) -> str:
    return f"learned {kind}"
