"""What a client is told of an append that was not acknowledged, and what of its request is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.core.messages import Cancel, RequestRecord, decode
from greenroom.fabric.log import MemoryBroker
from greenroom.fabric.topics import REQUESTS, Topics, all_topics
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline import Pipeline, PipelineConfig
from tests.pipeline.troubled_log import TroubledLog, in_turn
from tests.unit.gateway.test_pipeline_members import Members, worker


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
        await asyncio.gather(*self.pipeline._cancels)
        found = []
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
async def test_what_was_not_sent_is_for_later_and_leaves_nothing_behind(world: World, keyed: bool) -> None:
    world.log.trouble = in_turn(REQUESTS, "unsent")
    with pytest.raises(ApiError) as raised:
        await world.ask(keyed=keyed)
    assert (raised.value.status, raised.value.code) == (503, "not_sent")
    assert "Retry-After" in raised.value.headers
    assert await world.sent() == []
    assert len(world.pipeline.flights) == len(world.pipeline.flights.book) == 0


async def test_what_is_refused_is_the_request_s_own_fault(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "refused")
    with pytest.raises(InvalidRequest) as raised:
        await world.ask()
    assert raised.value.code == "too_large"
    assert await world.sent() == []
    assert len(world.pipeline.flights.book) == 0


async def test_a_cancel_goes_after_what_may_be_there(world: World) -> None:
    world.log.trouble = in_turn(REQUESTS, "landed")
    with pytest.raises(ApiError) as raised:
        await world.ask()
    assert (raised.value.status, raised.value.code) == (503, "unknown_acknowledgement")
    _, cancel = await world.sent()
    assert isinstance(cancel, Cancel)
