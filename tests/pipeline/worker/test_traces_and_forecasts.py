"""What a worker tells predictors, and what it is told by them: neither ever holds it up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from greenroom.core.messages import MemberKind, Trace, decode
from greenroom.fabric.log import AppendUnknown
from greenroom.policies.popularity import POPULARITY
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from greenroom.worker.service_config import ForecastConfig, TraceConfig
from tests.pipeline.worker.scripted import Stage, answer, staged, until

PROMPT = (1, 2, 3)


async def finish(stage: Stage, name: str, n: int, *, task_type: str = "converse") -> None:
    before = len(stage.engine.begun)
    call = stage.run(stage.task(name, reply_to=None, length=1, task_type=task_type), n)
    await until(lambda: len(stage.engine.begun) > before)
    await stage.step(1)
    assert tuple((await call).result.token_ids) == answer(PROMPT, 1)


# -- traces --------------------------------------------------------------------------------------------------


async def test_the_routing_of_a_finished_sequence_is_written() -> None:
    async with staged(pool=0) as stage:
        await finish(stage, "a", 0, task_type="compare")
        await until(lambda: stage.service.counters.traces == 1)
        (written,) = await stage.traces()
        trace: Trace = decode(written, Trace)
        assert (trace.request_id, trace.task_type, trace.model, trace.worker) == (
            "a",
            "compare",
            "scripted",
            "worker-1",
        )
        assert (trace.rows, trace.prompt_rows, trace.layers, trace.k, trace.num_experts) == (3, 2, 2, 2, 3)
        experts = np.frombuffer(trace.experts, dtype=trace.dtype).reshape(trace.rows, trace.layers, trace.k)
        assert (experts == np.arange(12).reshape(3, 2, 2) % 3).all()


async def test_what_did_not_finish_is_not_traced() -> None:
    async with staged() as stage:
        call = stage.run(stage.task("a", reply_to=None))
        await until(lambda: stage.engine.begun)
        await stage.service.drain(0.0)
        await call
        gauges = {name: value for name, _, value in stage.service.gauges()}
        assert (stage.service.counters.traces, gauges["traces_waiting"], gauges["runs_here"]) == (0, 0, 0)


async def test_a_log_that_takes_nothing_costs_traces_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = asyncio.Event()

    async def append(*_: Any, **__: Any) -> None:
        await stuck.wait()
        raise AppendUnknown("no acknowledgement")

    async with staged(traces=TraceConfig(waiting=2)) as stage:
        monkeypatch.setattr(stage.log, "append", append)
        for number in range(6):
            await finish(stage, f"r{number}", number)
        counters = stage.service.counters
        assert (counters.results, counters.traces) == (6, 0)
        assert counters.traces_dropped == 3, "one is being written, two wait"
        stuck.set()
        await until(lambda: counters.traces_failed == 3)


async def test_traces_can_be_switched_off() -> None:
    async with staged(traces=TraceConfig(enabled=False)) as stage:
        await finish(stage, "a", 0)
        assert stage.service.counters.traces == 0


# -- forecasts -----------------------------------------------------------------------------------------------


class Predictor(predictor_pb2_grpc.PredictorServicer):
    """Says that everything is equally likely, or nothing at all."""

    def __init__(self, layers: int = 2, experts: int = 3) -> None:
        self.asked: list[str] = []
        self.silent = False
        self.layers, self.experts = layers, experts
        self.distribution = np.full(layers * experts, 1 / experts, dtype="<f4")

    async def Forecast(self, request: predictor_pb2.ForecastRequest, context: Any) -> predictor_pb2.ForecastResponse:
        self.asked.append(request.task_type)
        if self.silent:
            await asyncio.Event().wait()
        return predictor_pb2.ForecastResponse(
            version=7, layers=self.layers, experts=self.experts, distribution=self.distribution.tobytes()
        )

    async def ListArtifacts(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetArtifact(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def RollBack(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


async def with_predictor(stage: Stage, **shape: int) -> Predictor:
    predictor = Predictor(**shape)
    stage.members.add("predictor", await stage.net.serve("predictor", predictor), MemberKind.PREDICTOR)
    return predictor


async def test_a_forecast_once_in_so_many_prompts_for_the_tasks_that_are_here() -> None:
    async with staged(forecasts=ForecastConfig(every=3)) as stage:
        predictor = await with_predictor(stage)
        held = stage.run(stage.task("held", reply_to=None, length=100, task_type="classify"), 0)
        await until(lambda: stage.service.counters.forecasts == 1)
        assert predictor.asked == ["classify"]
        for number in range(1, 7):
            await finish(stage, f"r{number}", number)
        await until(lambda: stage.service.counters.forecasts >= 5)
        assert predictor.asked.count("converse") == 2
        assert predictor.asked.count("classify") == 3
        first = stage.engine.foreseen[0]
        assert (first.request.kind, first.request.layers, first.request.task) == (POPULARITY, (0, 2), "classify")
        assert first.version == "7"
        assert first.values.tolist() == pytest.approx([1 / 3] * 6)
        held.cancel()


async def test_no_forecasts_where_none_are_wanted() -> None:
    async with staged(forecasts=ForecastConfig(every=0)) as stage:
        predictor = await with_predictor(stage)
        await finish(stage, "a", 0)
        assert predictor.asked == []


@pytest.mark.parametrize("trouble", ["nobody", "down", "slow", "new", "other model", "no probabilities"])
async def test_without_a_forecast_the_worker_goes_on(trouble: str) -> None:
    async with staged(forecasts=ForecastConfig(every=1, timeout_ms=50)) as stage:
        if trouble == "down":
            stage.members.add("predictor", "predictor:9000", MemberKind.PREDICTOR)
        elif trouble != "nobody":
            layers = {"other model": 4, "new": 0}.get(trouble, 2)
            predictor = await with_predictor(stage, layers=layers)
            predictor.silent = trouble == "slow"
            if trouble == "no probabilities":
                predictor.distribution[2] = np.nan
        held = stage.run(stage.task("held", reply_to=None, length=100), 99)
        await until(lambda: stage.service.counters.forecasts_failed >= 1)
        await finish(stage, "a", 0)
        assert stage.engine.foreseen == []
        held.cancel()


async def test_the_address_of_a_predictor_may_be_given() -> None:
    config = ForecastConfig(every=1, address="elsewhere:1")
    async with staged(forecasts=config) as stage:
        await stage.net.serve("elsewhere", Predictor())
        held = stage.run(stage.task("held", reply_to=None, length=100), 0)
        await until(lambda: stage.service.counters.forecasts == 1)
        held.cancel()
