"""The asyncio edge: a reader that comes, reads slowly, or goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest
import torch

from greenroom.core.errors import InvalidRequest, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Generator, ServedModel, Token
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop
from greenroom.worker.model.generator import LoopGenerator
from tests.contract.batching.harness import request
from tests.unit.batching.fake_model import FakeModel, continuation

SERVED = ServedModel("fake", 1000, 64, (2,), 0)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def loop(model: FakeModel) -> Iterator[BatchLoop]:
    loop = BatchLoop(BatchEngine(model.as_ragged(), BatchConfig(1 << 20, max_running=2, max_waiting=1))).start()
    yield loop
    model.gate.set()
    loop.stop()
    assert loop.unfinished == 0
    loop.engine.audit()


@pytest.fixture
def generator(loop: BatchLoop) -> Generator:
    return LoopGenerator(loop, SERVED)


async def read(events: AsyncIterator[Event]) -> tuple[tuple[int, ...], Finished]:
    ids: list[int] = []
    async for event in events:
        if isinstance(event, Finished):
            return tuple(ids), event
        ids.append(event.token_id)
    raise AssertionError("no Finished")


def streamed(generator: Generator, asked: GenerationRequest) -> Any:
    """The async generator that it is."""
    return cast(Any, generator.generate(asked))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what other tasks do next makes it true, and nothing tells of it
            await asyncio.sleep(0)


async def idle(loop: BatchLoop) -> bool:
    return await asyncio.to_thread(loop.wait_idle, 30)


async def test_tokens_in_order_and_one_end(generator: Generator) -> None:
    assert generator.ready
    assert generator.model is SERVED
    both = await asyncio.gather(*(read(generator.generate(request(f"r{i}", (i, 2), 6, logprobs=2))) for i in range(2)))
    for place, (ids, finished) in enumerate(both):
        assert ids == continuation((place, 2), 6)
        assert finished == Finished(FinishReason.LENGTH, 2, 6)


async def test_nothing_is_asked_before_the_first_step_of_the_iterator(generator: Generator, loop: BatchLoop) -> None:
    unread = streamed(generator, request("a", ()))
    assert loop.unfinished == 0
    with pytest.raises(InvalidRequest):
        await anext(unread)
    assert loop.unfinished == 0


async def test_a_full_queue_is_told_at_the_first_step(generator: Generator, loop: BatchLoop, model: FakeModel) -> None:
    model.gate.clear()
    tasks = [asyncio.create_task(read(generator.generate(request(f"r{i}", (i,), 2)))) for i in range(3)]
    await until(lambda: loop.unfinished == 3)
    with pytest.raises(Saturated):
        await anext(streamed(generator, request("late", (1,), 2)))
    model.gate.set()
    assert [ids for ids, _ in await asyncio.gather(*tasks)] == [continuation((i,), 2) for i in range(3)]


async def test_closing_cancels_a_running_request(generator: Generator, loop: BatchLoop) -> None:
    async with aclosing(streamed(generator, request("a", (1,), 900))) as events:
        first = await anext(events)
        assert isinstance(first, Token)
    assert await idle(loop)
    assert loop.stats().finished[FinishReason.CANCELLED] == 1
    assert loop.stats().generated_tokens < 900


async def test_closing_cancels_a_waiting_request(generator: Generator, loop: BatchLoop, model: FakeModel) -> None:
    model.gate.clear()
    held = [asyncio.create_task(read(generator.generate(request(f"r{i}", (i,), 2)))) for i in range(2)]
    await until(lambda: loop.unfinished == 2)
    waiting = asyncio.create_task(read(generator.generate(request("waits", (9,), 2))))
    await until(lambda: loop.unfinished == 3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    model.gate.set()
    assert len(await asyncio.gather(*held)) == 2
    assert await idle(loop)
    stats = loop.stats()
    assert (stats.finished[FinishReason.CANCELLED], stats.started) == (1, 2)


async def test_a_slow_reader_delays_no_other_stream(generator: Generator, loop: BatchLoop) -> None:
    async with aclosing(streamed(generator, request("slow", (1,), 40))) as slow:
        await anext(slow)
        ids, _ = await read(generator.generate(request("quick", (2,), 60)))
        assert ids == continuation((2,), 60)
        assert await idle(loop)
        rest, finished = await read(slow)
        assert (continuation((1,), 40)[1:], FinishReason.LENGTH) == (rest, finished.reason)


async def test_the_end_of_the_loop_ends_the_stream(generator: Generator, loop: BatchLoop, model: FakeModel) -> None:
    model.gate.clear()
    reading = asyncio.create_task(read(generator.generate(request("a", (1,), 900))))
    assert await asyncio.to_thread(model.entered.wait, 30)
    stopping = asyncio.create_task(asyncio.to_thread(loop.stop))
    await until(lambda: not generator.ready)
    model.gate.set()
    _, finished = await reading
    assert finished.reason is FinishReason.CANCELLED
    await stopping
    assert not generator.ready


def test_an_event_loop_that_is_gone_cancels_its_requests(
    generator: Generator, loop: BatchLoop, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward
    run: list[int] = []

    def stopping_after_one(chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = forward(chunks)
        if not run:
            model.gate.clear()  # nothing more is generated until the event loop is gone
        run.append(len(chunks))
        return logits

    monkeypatch.setattr(model, "forward", stopping_after_one)

    async def begin() -> Any:
        events = streamed(generator, request("a", (1,), 900))
        await anext(events)
        return events

    runner = asyncio.new_event_loop()
    events = runner.run_until_complete(begin())
    runner.close()
    model.gate.set()
    assert loop.wait_idle(30)
    assert loop.stats().finished[FinishReason.CANCELLED] == 1
    del events
