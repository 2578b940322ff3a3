"""Requests with an idempotency key: one run, however many clients ask and whichever of them leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom.core.errors import Conflict, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.text import Tokenizer
from tests import small_tokenizers
from tests.scripted_generator import DEADLINE_S, ScriptedGenerator
from tests.scripted_pool import pipeline_to
from tests.waiting import until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(small_tokenizers.write_chat(Path(tmp_path_factory.mktemp("x"))))


@pytest.fixture
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer)


@pytest.fixture
async def pipeline(generator: ScriptedGenerator) -> AsyncIterator[Pipeline]:
    async with pipeline_to(generator, max_keyed=4) as made:
        yield made
    await generator.until_idle()


def request(name: str = "r", digest: bytes = b"same", *, keyed: bool = True) -> GenerationRequest:
    return GenerationRequest(name, (7, 8), SamplingParams(max_tokens=20), keyed=keyed, digest=digest, timeout_s=60)


async def all_of(pipeline: Pipeline, asked: GenerationRequest) -> list[Event]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in pipeline.generate(asked)]


async def test_a_second_one_gets_all_of_the_first(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    await generator.allow(5)
    first = asyncio.ensure_future(all_of(pipeline, request()))
    await generator.until_active(1)
    second = asyncio.ensure_future(all_of(pipeline, request()))
    await generator.allow(None)
    events = await first
    assert await second == events
    assert await all_of(pipeline, request()) == events, "and so does one that comes when it has ended"
    assert [event.index for event in events if isinstance(event, Token)] == list(range(20))
    assert len(generator.seen) == 1


async def test_it_goes_on_when_its_client_leaves(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    await generator.allow(3)
    events = pipeline.generate(request())
    got = [await asyncio.wait_for(anext(events), DEADLINE_S) for _ in range(3)]
    await events.aclose()  # type: ignore[attr-defined]
    assert list(generator.active) == ["r"]
    running = pipeline.keyed_request("r")
    assert running is not None
    ends: list[str] = []
    running.at_end.append(lambda: ends.append("r"))
    await generator.allow(None)
    await until(lambda: ends == ["r"], "its end is told")
    assert pipeline.keyed_request("r") is None
    assert generator.outcomes == {"r": FinishReason.LENGTH}
    assert (await all_of(pipeline, request()))[:3] == got
    assert len(generator.seen) == 1


async def test_a_retry_whose_answer_was_dropped_is_told_so_at_once(generator: ScriptedGenerator) -> None:
    async with pipeline_to(generator, keep_outcomes_bytes=2_200) as pipeline:
        await generator.allow(None)
        for number in range(12):
            await all_of(pipeline, request(f"r{number}"))
        with pytest.raises(ApiError, match="dropped the answer"):
            await all_of(pipeline, request("r4"))
        assert len(await all_of(pipeline, request("r11"))) == 21
    assert len(generator.seen) == 12, "none ran twice"


async def test_without_a_key_it_ends_with_its_client(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    await generator.allow(1)
    events = pipeline.generate(request(keyed=False))
    await asyncio.wait_for(anext(events), DEADLINE_S)
    assert pipeline.keyed_request("r") is None
    await events.aclose()  # type: ignore[attr-defined]
    await generator.until_idle()
    assert generator.outcomes == {"r": FinishReason.CANCELLED}


async def test_something_else_under_the_same_key_is_a_conflict(
    pipeline: Pipeline, generator: ScriptedGenerator
) -> None:
    await generator.allow(1)
    events = pipeline.generate(request())
    await asyncio.wait_for(anext(events), DEADLINE_S)
    with pytest.raises(Conflict, match="send this one with a key of its own"):
        await all_of(pipeline, request(digest=b"other"))
    await generator.allow(None)
    assert isinstance([event async for event in events][-1], Finished)
    with pytest.raises(Conflict, match="send this one with a key of its own"):
        await all_of(pipeline, request(digest=b"other"))
    assert len(generator.seen) == 1


async def test_what_failed_stays_so(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    """An outcome is final: under a key it is told again."""
    generator.fail_at = 2
    *_, end = await all_of(pipeline, request())
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.FAILED
    generator.fail_at = None
    assert await all_of(pipeline, request()) == [end]


async def test_not_more_at_once_than_allowed(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    await generator.allow(0)
    running = [asyncio.ensure_future(all_of(pipeline, request(f"r{number}"))) for number in range(4)]
    await generator.until_active(4)
    with pytest.raises(Saturated, match="4 requests with idempotency keys run"):
        await all_of(pipeline, request("one more"))
    await generator.allow(None)
    await asyncio.gather(*running, all_of(pipeline, request("r1")), all_of(pipeline, request("x", keyed=False)))


async def test_cancelling_ends_it_for_all_its_clients(pipeline: Pipeline, generator: ScriptedGenerator) -> None:
    await generator.allow(2)
    both = [asyncio.ensure_future(all_of(pipeline, request())) for _ in range(2)]
    await generator.until_active(1)
    await pipeline.cancel("r")
    for events in await asyncio.gather(*both):
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.CANCELLED
    await pipeline.cancel("r")
    await pipeline.cancel("never known")


async def test_one_whose_client_leaves_before_it_is_on_the_log_is_sent_all_the_same(
    pipeline: Pipeline, generator: ScriptedGenerator
) -> None:
    events = pipeline.generate(request())
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert generator.seen == []
    first.cancel()
    await asyncio.wait([first])
    assert len(await all_of(pipeline, request())) == 21
    assert len(generator.seen) == 1
