"""What a worker tells predictors and what they tell it. Neither ever holds it up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.messages import MemberKind, Trace, decode
from greenroom.fabric.log import AppendUnknown, LogFailed
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from greenroom.worker.service_config import ForecastConfig, TraceConfig
from tests.pipeline.worker.scripted import Stage, answer, staged, until
from tests.unit.policies.model_profiles import model_profile, task_profile

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
        assert (trace.report, trace.artifacts) == ({"prefetch_recall": 0.5}, {"eamc": 7000})


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


async def test_a_worker_that_may_not_write_traces_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [AppendUnknown("slow"), LogFailed("not authorised"), LogFailed("not authorised")]

    async def append(*_: Any, **__: Any) -> None:
        raise errors.pop(0)

    async with staged() as stage:
        monkeypatch.setattr(stage.log, "append", append)
        for number in range(3):
            await finish(stage, f"r{number}", number)
        counters = stage.service.counters
        await until(lambda: counters.traces_failed == 3)
        told = [record.getMessage() for record in caplog.records if "routing trace" in record.getMessage()]
        assert told == ["a routing trace was not written: slow", "a routing trace was not written: not authorised"]
        assert stage.service.unready is None
        assert len(stage.service.tasks) >= 4, "its tasks go on, the one that writes traces among them"


async def test_traces_can_be_switched_off() -> None:
    async with staged(traces=TraceConfig(enabled=False)) as stage:
        await finish(stage, "a", 0)
        assert stage.service.counters.traces == 0


# -- forecasts -----------------------------------------------------------------------------------------------


class Predictor(predictor_pb2_grpc.PredictorServicer):
    """Says that everything is equally likely, or nothing at all."""

    def __init__(self, layers: int = 2, experts: int = 3) -> None:
        self.asked: list[str] = []
        self.requests: list[predictor_pb2.ForecastRequest] = []
        self.source = "task type"
        self.silent = False
        self.layers, self.experts = layers, experts
        self.distribution = np.full(layers * experts, 1 / experts, dtype="<f4")

    async def Forecast(self, request: predictor_pb2.ForecastRequest, context: Any) -> predictor_pb2.ForecastResponse:
        self.asked.append(request.task_type)
        self.requests.append(request)
        if self.silent:
            await asyncio.Event().wait()
        return predictor_pb2.ForecastResponse(
            version=7,
            layers=self.layers,
            experts=self.experts,
            distribution=self.distribution.tobytes(),
            source=self.source,
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


@pytest.mark.parametrize(
    "trouble", ["no predictor", "down", "slow", "new", "uniform", "other model", "no probabilities"]
)
async def test_without_a_forecast_the_worker_goes_on(trouble: str) -> None:
    async with staged(forecasts=ForecastConfig(every=1, timeout_ms=50)) as stage:
        if trouble == "down":
            stage.members.add("predictor", "predictor:9000", MemberKind.PREDICTOR)
        elif trouble != "no predictor":
            layers = {"other model": 4, "new": 0}.get(trouble, 2)
            predictor = await with_predictor(stage, layers=layers)
            predictor.silent = trouble == "slow"
            predictor.source = "uniform" if trouble == "uniform" else predictor.source
            if trouble == "no probabilities":
                predictor.distribution[2] = np.nan
        held = stage.run(stage.task("held", reply_to=None, length=100), 99)
        await until(lambda: stage.service.counters.forecasts_failed >= 1)
        await finish(stage, "a", 0)
        assert stage.engine.foreseen == []
        held.cancel()


@pytest.mark.parametrize("comes", ["another prompt", "none"])
async def test_a_forecast_that_failed_is_asked_for_again_while_there_are_requests(comes: str) -> None:
    """Not forty prompts later: before the first one there is nothing to go by."""
    async with staged(forecasts=ForecastConfig(every=40, retry_ms=1.0)) as stage:
        counters = stage.service.counters
        held = stage.run(stage.task("held", reply_to=None, length=100), 0)
        await until(lambda: counters.forecasts_failed >= 2)
        held.cancel()
        if comes == "another prompt":
            stage.service.cancel("held", Attempt(stage.epoch, 0))
            await until(lambda: counters.forecasts_spared >= 1, "nothing runs: no predictor is asked")
            failed = counters.forecasts_failed
            held = stage.run(stage.task("next", reply_to=None, length=100), 1)
            await until(lambda: counters.forecasts_failed > failed)
        predictor = await with_predictor(stage)
        await until(lambda: counters.forecasts == 1)
        assert len(predictor.asked) == 1
        held.cancel()


async def test_a_predictor_that_fails_is_asked_less_and_less_often() -> None:
    async with staged(forecasts=ForecastConfig(every=6, retry_ms=3_600_000.0)) as stage:
        counters = stage.service.counters
        held = stage.run(stage.task("held", reply_to=None, length=100), 0)
        await until(lambda: counters.forecasts_failed == 1)
        for number in range(1, 6):
            await finish(stage, f"r{number}", number)
        assert counters.forecasts_failed == 1, "prompts before the next that is due do not ask"
        await finish(stage, "due", 6)
        await until(lambda: counters.forecasts_failed == 2)
        held.cancel()


async def test_the_address_of_a_predictor_may_be_given() -> None:
    config = ForecastConfig(every=1, address="elsewhere:1")
    async with staged(forecasts=config) as stage:
        await stage.net.serve("elsewhere", Predictor())
        held = stage.run(stage.task("held", reply_to=None, length=100), 0)
        await until(lambda: stage.service.counters.forecasts == 1)
        held.cancel()


# -- eMoE: which tasks, by what ------------------------------------------------------------------------------------

EVEN = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
PROFILE = model_profile(
    {
        "classify": task_profile(EVEN, insensitive=2),
        "compare": task_profile(EVEN, insensitive=2),
        "question": task_profile([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], insensitive=1),
        "converse": task_profile(EVEN),
    }
)


def held(stage: Stage, name: str, n: int, task_type: str) -> Any:
    return stage.run(stage.task(name, reply_to=None, length=100, task_type=task_type), n)


async def forecast(stage: Stage, count: int) -> None:
    await until(lambda: stage.service.counters.forecasts == count)


async def test_no_predictor_is_asked_while_no_task_is_sensitive_and_then_at_the_next_prompt() -> None:
    async with staged(forecasts=ForecastConfig(every=40), profile=PROFILE) as stage:
        predictor = await with_predictor(stage)
        counters = stage.service.counters
        calls = [held(stage, "a", 0, "classify")]
        await until(lambda: counters.forecasts_spared == 1)
        calls.append(held(stage, "b", 1, "compare"))
        await until(lambda: counters.forecasts_spared == 2)
        assert predictor.asked == []
        calls.append(held(stage, "c", 2, "question"))
        await until(lambda: counters.forecasts == 1)
        assert predictor.asked == ["question"], "those that are sensitive nowhere are left out"
        calls.append(held(stage, "d", 3, "converse"))
        await until(lambda: len(stage.engine.begun) == 4)
        assert predictor.asked == ["question"], "it was asked: the next time is in forty prompts"
        for call in calls:
            call.cancel()


async def test_a_task_that_was_not_profiled_is_sensitive() -> None:
    async with staged(forecasts=ForecastConfig(every=1), profile=PROFILE) as stage:
        predictor = await with_predictor(stage)
        call = held(stage, "a", 0, "unheard-of")
        await until(lambda: stage.service.counters.forecasts == 1)
        assert predictor.asked == ["unheard-of"]
        call.cancel()


@pytest.mark.parametrize("traced", [True, False])
async def test_a_learnt_predictor_is_told_of_the_last_prompt_that_finished(traced: bool) -> None:
    """The prompt is of the same type. Before there is one, the profile's popularity is told. Of an unknown type nothing
    is."""
    config = ForecastConfig(every=1, predictor="emoe-a")
    async with staged(forecasts=config, traces=TraceConfig(enabled=traced), profile=PROFILE) as stage:
        predictor = await with_predictor(stage)
        predictor.source = "learned emoe-a"
        counters = stage.service.counters
        for number, task_type in enumerate(("question", "question", "unheard-of")):
            await finish(stage, f"r{number}", number, task_type=task_type)
            await forecast(stage, number + 1)
        assert [(one.predictor, one.task_type) for one in predictor.requests] == [
            ("emoe-a", "question"),
            ("emoe-a", "question"),
            ("emoe-a", "unheard-of"),
        ]
        first, second, third = (np.frombuffer(one.previous, dtype="<f4").tolist() for one in predictor.requests)
        assert first == pytest.approx([0.5, 0.25, 0.25, 0, 0, 1])
        picks = np.arange(12).reshape(3, 2, 2) % 3  # as the script's routing has it
        shares = [np.bincount(picks[:, layer].ravel(), minlength=3) / 6 for layer in range(2)]
        assert second == pytest.approx(np.concatenate(shares).tolist())
        assert third == []
        assert counters.forecasts_by_source == {"learned emoe-a": 3}
        await until(lambda: counters.traces == (3 if traced else 0))


async def test_statistics_are_asked_for_without_a_previous_prompt() -> None:
    async with staged(forecasts=ForecastConfig(every=1), profile=PROFILE) as stage:
        predictor = await with_predictor(stage)
        for number in range(2):
            await finish(stage, f"r{number}", number)
            await forecast(stage, number + 1)
        assert {(one.predictor, one.previous) for one in predictor.requests} == {("", b"")}


async def test_the_scheduler_is_told_what_a_request_of_each_task_would_load() -> None:
    async with staged() as stage:
        lease = await stage.lease()
        assert dict(lease.states[0].load_ms_by_task) == {"converse": 6.0, "classify": 0.0}
