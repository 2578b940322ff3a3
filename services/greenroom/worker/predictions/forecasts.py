"""Forecasts of which experts the coming prompts need, asked of the predictor service once in a while (eMoE §3.3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import grpc
import numpy as np

from greenroom.core.artifacts.forecast_kinds import STATISTICS
from greenroom.fabric.rpc import Dialer
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from greenroom.worker.predictions.predictor_calls import Predictors, address_of, said
from greenroom.worker.service_config import ForecastConfig
from greenroom.worker.service_counters import ServiceCounters

log = logging.getLogger(__name__)

MOST_TASKS = 8
"""How many task types are asked for at a time, the commonest first."""

_LONGEST_PAUSE_MS = 30_000.0

_NOTHING_KNOWN = "uniform"
"""The source of a forecast that has the same value for every expert."""


class Forecaster:
    """Asks the predictor once in ``every`` prompts, from the first on, for the task types that run then.

    Task types that are sensitive in no layer are left out. Where only such run, the question waits for the next prompt.
    One call at a time, each with a deadline. A predictor that is down, slow, new or of another model is counted and
    costs nothing else: the expert policy goes on with what it knows. While requests are here the predictor is asked
    again after ``retry_ms``, then after twice as long, and so on; else with the next request.
    """

    def __init__(
        self,
        dialer: Dialer,
        members: Predictors,
        config: ForecastConfig,
        counters: ServiceCounters,
        *,
        model: str,
        experts: int,
        running: Callable[[], Mapping[str, int]],
        foresee: Callable[[Prediction], None],
        sensitive: Callable[[str], bool] = lambda task: True,
        previous: Callable[[str], Callable[[], bytes]] = lambda task: bytes,
    ) -> None:
        """``experts``: of all layers. ``running``: how many requests of each task type are here. ``sensitive``: whether
        a task type's answers depend, in some layer, on which experts are resident. ``previous``: where the last prompt
        of a task type was routed, as ForecastRequest has it, for predictors that go by it. The function that it returns
        is called in a thread.
        """
        self._dialer = dialer
        self._members = members
        self._config = config
        self._counters = counters
        self._model = model
        self._experts = experts
        self._running = running
        self._foresee = foresee
        self._sensitive = sensitive
        self._previous = previous
        self._prompts = 0
        self._spared = False
        self._due = asyncio.Event()
        self._failing = False

    def prompt_begun(self) -> None:
        """One more prompt was begun."""
        if self._config.every and (self._spared or self._prompts % self._config.every == 0):
            self._due.set()
        self._prompts += 1

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            pause_ms = self._config.retry_ms
            while not await self._ask_all():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_ms / 1000.0):
                        await self._due.wait()
                self._due.clear()
                pause_ms = min(2 * pause_ms, max(self._config.retry_ms, _LONGEST_PAUSE_MS))

    async def _ask_all(self) -> bool:
        """Whether every task type that needs a forecast has one now, or none needs one."""
        mix = {task: count for task, count in self._running().items() if self._sensitive(task)}
        self._spared = not mix
        self._counters.forecasts_spared += not mix
        for task in sorted(mix, key=lambda task: (-mix[task], task))[:MOST_TASKS]:
            if not await self._take(task):
                return False
        return True

    async def _take(self, task: str) -> bool:
        """Whether there was a forecast. Where there was none the other task types are not asked for."""
        try:
            prediction, source = await self._ask(task)
            self._foresee(prediction)
            self._counters.forecast(source)
            self._failing = False
            return True
        except (grpc.RpcError, TimeoutError, LookupError, ValueError) as error:
            self._counters.forecasts_failed += 1
            level = logging.INFO if isinstance(error, LookupError) else logging.WARNING
            level = logging.DEBUG if self._failing else level
            log.log(level, "no forecast, the expert policy goes on with what it knows: %s", said(error))
            self._failing = True
            return False

    async def _ask(self, task: str) -> tuple[Prediction, str]:
        """The forecast, and what it was made from. Raises what the call raises, LookupError where there is no
        predictor, ValueError where the answer is about other experts."""
        stub = self._dialer.stub(predictor_pb2_grpc.PredictorStub, address_of(self._config.address, self._members))
        timeout_s = self._config.timeout_ms / 1000.0
        config = self._config
        previous = await asyncio.to_thread(self._previous(task)) if config.by_previous else b""
        request = predictor_pb2.ForecastRequest(
            model=self._model,
            task_type=task,
            previous=previous,
            predictor="" if config.predictor == STATISTICS else config.predictor,
        )
        async with asyncio.timeout(timeout_s):
            answer = await stub.Forecast(request, timeout=timeout_s)
        if answer.layers == 0 or answer.source == _NOTHING_KNOWN:
            raise LookupError(f"the predictor knows nothing of {self._model} yet")
        if answer.layers * answer.experts != self._experts or len(answer.distribution) != 4 * self._experts:
            raise ValueError(
                f"it is of {answer.layers} layers of {answer.experts} experts, the model has {self._experts} experts"
            )
        values = np.frombuffer(answer.distribution, dtype="<f4").astype(np.float32)
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("it has weights that are no probabilities")
        values.setflags(write=False)
        asked = PredictionRequest(POPULARITY, (0, answer.layers), task=task)
        return Prediction(asked, str(answer.version), values), answer.source
