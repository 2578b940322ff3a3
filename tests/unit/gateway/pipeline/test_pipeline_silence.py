"""While the log is silent: what /health says, and what a client gets if its request can not be ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.core.messages import Cancel, Claim, Outcome, RequestRecord, decode, encode
from greenroom.fabric.log import MemoryBroker, MemoryLog
from greenroom.fabric.log.health import HealthConfig, LogHealth
from greenroom.fabric.topics import JOURNAL, REQUESTS, Topics, all_topics
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from tests.unit.gateway.pipeline.members import Members, worker
from tests.waiting import until


class Stage:
    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.health = LogHealth(HealthConfig(silent_ms=1.0), now=0.0)
        directory: Any = Members()
        directory.here = [worker("w")]
        config = PipelineConfig(quiet_s=0.05)
        self.pipeline = Pipeline(config, instance="g", log=log, directory=directory, health=self.health)
        self.answers()

    def answers(self) -> None:
        """The log does, from now on for an hour."""
        later = time.time() * 1000 + 3_600_000
        self.health.acknowledged(later, later, later)

    def falls_silent(self) -> None:
        self.health._answered = 0.0

    def ask(self, request_id: str, *, keyed: bool = False) -> AsyncIterator[Event]:
        return self.pipeline.generate(
            GenerationRequest(
                request_id=request_id,
                prompt_ids=(1,),
                sampling=SamplingParams(max_tokens=2),
                keyed=keyed,
                digest=b"d",
            )
        )

    async def ends(self, request_id: str, reason: FinishReason) -> None:
        outcome = Outcome(epoch=0, request_id=request_id, reason=reason, token_ids=(), keyed=True, digest=b"d")
        await self.log.append(JOURNAL, encode(outcome), partition=0)

    async def sent(self) -> list[RequestRecord]:
        async with self.log.reader(REQUESTS, 0) as reader:
            return [decode(record.value or b"", RequestRecord) for record in await reader.poll(1.0)]


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr("greenroom.gateway.pipeline.pipeline._LOOK_S", 0.01)
    async with MemoryLog(MemoryBroker()) as log:
        await log.ensure(all_topics(Topics(request_partitions=1)))
        await log.append(JOURNAL, encode(Claim(scheduler="s", read_to=0)), partition=0)
        stage = Stage(log)
        await stage.pipeline.start()
        yield stage
        await stage.pipeline.stop()


async def test_a_gateway_is_not_ready_while_the_log_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        assert stage.pipeline.ready
        stage.falls_silent()
        assert "the log has acknowledged nothing for" in (stage.pipeline.unready or "")
        stage.answers()
        assert stage.pipeline.ready


@pytest.mark.timeout(60)
async def test_a_stream_whose_end_can_not_be_told_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        events = stage.ask("r")
        stream = object()

        async def worker_sends() -> None:
            await until(lambda: "r" in stage.pipeline.in_flight.book, "it is on its way")
            stage.pipeline.in_flight.book.open("r", Attempt(0, 0), stream)
            tokens = (Token(0, 7), Token(1, 8))
            stage.pipeline.in_flight.add("r", stream, tokens)
            stage.falls_silent()

        sending = stage.pipeline.tasks.start(worker_sends(), name="a worker")
        had = [await anext(events), await anext(events)]
        assert had == [Token(0, 7), Token(1, 8)]
        with pytest.raises(ApiError) as raised:
            await anext(events)
        assert (raised.value.status, raised.value.code) == (503, "outcome_unknown")
        await sending
        await until(lambda: not stage.pipeline._appends, "its cancel was sent")
        assert isinstance((await stage.sent())[-1], Cancel)


@pytest.mark.timeout(60)
async def test_a_retry_under_its_key_finds_the_outcome_when_the_log_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        stage.falls_silent()
        with pytest.raises(ApiError) as raised:
            await anext(stage.ask("k", keyed=True))
        assert raised.value.code == "outcome_unknown"
        assert [type(record).__name__ for record in await stage.sent()] == ["Request"], "and no cancel"
        stage.answers()
        await stage.ends("k", FinishReason.CANCELLED)
        event = await anext(stage.ask("k", keyed=True))
        assert isinstance(event, Finished)
        assert event.reason is FinishReason.CANCELLED


@pytest.mark.timeout(60)
async def test_a_deadline_in_the_silence_does_not_say_that_there_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        events = stage.ask("k", keyed=True)

        async def deadline_passes() -> None:
            await until(lambda: stage.pipeline.keyed_request("k"), "it is on its way")
            request = stage.pipeline.keyed_request("k")
            assert request is not None
            stage.falls_silent()
            request.deadline_ms = 0

        passing = stage.pipeline.tasks.start(deadline_passes(), name="time")
        with pytest.raises(ApiError) as raised:
            await anext(events)
        await passing
        assert raised.value.code == "outcome_unknown"
        assert stage.pipeline.keyed_request("k") is None, "it has given its place back"


async def expired(stage: Stage, *, keyed: bool) -> str:
    """What is told of a request that the scheduler ends as expired at once."""
    events = stage.ask("r", keyed=keyed)

    async def scheduler_ends() -> None:
        await until(lambda: "r" in stage.pipeline.in_flight.book, "it is on its way")
        await stage.ends("r", FinishReason.EXPIRED)

    ending = stage.pipeline.tasks.start(scheduler_ends(), name="a scheduler")
    event = await anext(events)
    await ending
    assert isinstance(event, Finished)
    assert event.reason is FinishReason.EXPIRED
    return event.error or ""


@pytest.mark.timeout(60)
async def test_one_that_expires_before_its_time_is_told_of_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        told = await expired(stage, keyed=False)
        assert "10.0 minutes that it had: the clocks of the gateway and the scheduler differ" in told
        assert "behind" not in told


@pytest.mark.timeout(60)
async def test_so_is_one_that_the_logs_stamps_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as stage:
        stage.health.skew_ms = -7_200_000.0
        assert "this machine's clock is 2.0 hours behind the log's" in await expired(stage, keyed=True)


@pytest.mark.timeout(60)
async def test_of_a_key_that_another_call_may_have_used_before_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as stage:
        stage.health.skew_ms = 0.0
        assert "clocks" not in await expired(stage, keyed=True)
