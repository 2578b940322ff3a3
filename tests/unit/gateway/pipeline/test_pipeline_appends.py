"""What a client is told of an append that was not acknowledged, and what of its request is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import FinishReason, GenerationRequest, SamplingParams
from greenroom.core.messages import Cancel, Outcome, Request, RequestRecord, decode
from greenroom.fabric.log import MemoryBroker
from greenroom.fabric.topics import REQUESTS, Topics, all_topics
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.gateway.pipeline.stream_book import Unwanted
from tests.pipeline.troubled_log import TroubledLog, in_turn
from tests.unit.gateway.pipeline.members import Members, worker


class World:
    def __init__(self, log: TroubledLog) -> None:
        directory: Any = Members()
        directory.here = [worker("w")]
        self.log = log
        self.pipeline = Pipeline(PipelineConfig(), instance="g", log=log, directory=directory)

    async def ask(self, request_id: str = "r", *, keyed: bool = False) -> None:
        request = GenerationRequest(
            request_id=request_id, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1), keyed=keyed, digest=b"d"
        )
        async for _ in self.pipeline.generate(request):
            pass

    async def sent(self) -> list[RequestRecord]:
        """What is in the log, in order."""
        await asyncio.gather(*self.pipeline._appends)
        found: list[RequestRecord] = []
        for partition in range(await self.log.partitions(REQUESTS)):
            async with self.log.reader(REQUESTS, partition) as reader:
                end = await reader.end()
                while reader.position < end:
                    found += [decode(record.value or b"", RequestRecord) for record in await reader.poll(1.0)]
        return found


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with TroubledLog(MemoryBroker()) as log:
        await log.ensure(all_topics(Topics()))
        yield World(log)


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("trouble", ["unsent", "forbidden"])
async def test_what_was_not_sent_is_for_later_and_leaves_nothing_behind(
    world: World, keyed: bool, trouble: str
) -> None:
    world.log.trouble = in_turn(REQUESTS, trouble)
    with pytest.raises(ApiError) as raised:
        await world.ask(keyed=keyed)
    assert (raised.value.status, raised.value.code) == (503, "not_sent")
    assert "Retry-After" in raised.value.headers
    assert await world.sent() == []
    assert len(world.pipeline.in_flight) == len(world.pipeline.in_flight.book) == 0


async def test_what_is_refused_is_the_request_s_own_fault(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "refused")
    with pytest.raises(InvalidRequest) as raised:
        await world.ask()
    assert raised.value.code == "too_large"
    assert await world.sent() == []
    assert len(world.pipeline.in_flight.book) == 0


async def test_a_keyed_request_that_may_be_there_is_not_ended_and_a_retry_gets_its_outcome(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "landed")
    with pytest.raises(ApiError) as raised:
        await world.ask(keyed=True)
    assert (raised.value.status, raised.value.code) == (503, "unknown_acknowledgement")
    assert [type(record) for record in await world.sent()] == [Request]
    in_flight = world.pipeline.in_flight
    assert in_flight.book.open("r", Attempt(0, 0), object()) is Unwanted.NO_STREAM
    in_flight.outcome(Outcome(epoch=0, request_id="r", reason=FinishReason.LENGTH, keyed=True, digest=b"d"))
    await world.ask(keyed=True)
    assert len(await world.sent()) == 1


async def test_one_that_a_worker_has_opened_was_taken_whatever_became_of_its_acknowledgement(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "held")
    world.log.lose_held = True
    asked = asyncio.create_task(world.ask())
    await world.log.holding.wait()
    in_flight = world.pipeline.in_flight
    in_flight.book.open("r", Attempt(0, 0), object())
    world.log.release()
    in_flight.outcome(Outcome(epoch=0, request_id="r", reason=FinishReason.LENGTH, digest=b"d"))
    await asked


async def test_a_cancel_is_sent_until_it_is_acknowledged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.gateway.pipeline.pipeline._CANCEL_AGAIN_S", 0.0)
    world.log.trouble = in_turn(REQUESTS, "landed", *["lost", "unsent"] * 5)
    with pytest.raises(ApiError):
        await world.ask()
    assert [type(record) for record in await world.sent()] == [Request, Cancel]


@pytest.mark.parametrize(
    ("trouble", "code"),
    [("lost", "unknown_acknowledgement"), ("unsent", "not_sent"), ("forbidden", "not_sent"), ("refused", "not_sent")],
)
async def test_a_cancel_by_id_that_was_not_taken_is_an_error(world: World, trouble: str, code: str) -> None:
    world.log.trouble = in_turn(REQUESTS, trouble)
    with pytest.raises(ApiError) as raised:
        await world.pipeline.cancel("r")
    assert (raised.value.status, raised.value.code) == (503, code)
    assert "cancelled" in str(raised.value)


async def test_a_cancel_goes_after_what_may_be_there(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "landed")
    with pytest.raises(ApiError) as raised:
        await world.ask()
    assert (raised.value.status, raised.value.code) == (503, "unknown_acknowledgement")
    _, cancel = await world.sent()
    assert isinstance(cancel, Cancel)
    assert world.pipeline.in_flight.book.open("r", Attempt(0, 0), object()) is Unwanted.ENDED


async def test_a_cancel_comes_after_its_request(world: World) -> None:
    """Rule 9: it takes the request's own way. If it came first, its request would be unknown."""
    asked = asyncio.create_task(world.ask(keyed=True))
    await asyncio.sleep(0)
    await world.pipeline.cancel("r")
    assert [type(record) for record in await world.sent()] == [Request, Cancel]
    asked.cancel()
    await asyncio.wait([asked])


async def test_a_client_that_leaves_while_the_log_stands_still_leaves_a_cancel_alone(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "held")
    asked = asyncio.create_task(world.ask())
    await world.log.holding.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert [type(record) for record in await world.sent()] == [Cancel]
    assert not world.pipeline._appends


async def test_a_keyed_request_without_an_outcome_gives_its_place_back_after_its_deadline(world: World) -> None:
    asked = asyncio.create_task(world.ask(keyed=True))
    await asyncio.sleep(0)
    in_flight = world.pipeline.in_flight
    running = world.pipeline.keyed_request("r")
    assert running is not None
    ends: list[str] = []
    running.at_end.append(lambda: ends.append("r"))
    in_flight.expire(running.deadline_ms)
    assert (in_flight.keyed, ends) == (1, [])
    in_flight.expire(running.deadline_ms + 1)
    await asyncio.wait_for(asked, 60)
    assert (in_flight.keyed, len(in_flight), ends) == (0, 0, ["r"])
    assert running.finished is not None
    assert running.finished.reason is FinishReason.EXPIRED
