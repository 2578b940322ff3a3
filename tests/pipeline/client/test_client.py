"""The client package against real gateways: answers, errors, cancelling, and the other address when one refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from greenroom.client import (
    AsyncClient,
    BadRequest,
    Cancelled,
    Client,
    FinishReason,
    IdempotencyConflict,
    LimitExceeded,
    NotFound,
    Part,
    Slo,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from greenroom.core.errors import Saturated
from greenroom.core.generation import Event, GenerationRequest
from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys
from tests.pipeline.client.conftest import Start
from tests.scripted_generator import DEADLINE_S, TEXT

T = TypeVar("T")
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address that refuses, and that no other process can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def in_thread(use: Callable[[], T]) -> T:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(use)


async def collect(client: AsyncClient, prompt: str = "hello", **options: Any) -> list[Part]:
    async with asyncio.timeout(DEADLINE_S):
        return [part async for part in client.stream(prompt, **options)]


def joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


async def test_asynchronously(start: Start) -> None:
    place = await start()
    async with AsyncClient(place.address) as client:
        reply = await client.generate("hello", logprobs=2)
        assert (reply.text, reply.reason) == (TEXT, FinishReason.STOP)
        assert [token.index for token in reply.tokens] == list(range(reply.usage.completion_tokens))
        assert all(token.logprobs is not None and len(token.logprobs.top) == 2 for token in reply.tokens)
        scored = await client.generate("hello there", max_tokens=0, prompt_logprobs=0)
        assert scored.prompt is not None
        assert scored.prompt[0].logprobs is None
        assert [token.logprobs.chosen for token in scored.prompt[1:] if token.logprobs] == [
            -place / 8 for place in range(1, len(scored.prompt))
        ]
        parts = await collect(client, logprobs=2)
        assert joined(parts) == TEXT
        assert tuple(token for part in parts for token in part.tokens) == reply.tokens
        assert [part.reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.STOP]
        assert parts[-1].usage == reply.usage
        model = await client.model()
        assert (model.name, model.max_model_len, model.has_chat_template) == ("org/small", 256, True)


async def test_usage_says_what_was_approximated(start: Start) -> None:
    place = await start()
    async with AsyncClient(place.address) as client:
        exact = await client.generate("hello", max_tokens=3)
        place.generator.approximates = lambda request: 0.1
        near = await client.generate("hello", max_tokens=3)
        parts = await collect(client, max_tokens=3)
    assert (exact.usage.approximated, near.usage.approximated) == (0.0, 0.1), "as it was said, not as 32 bits have it"
    assert parts[-1].usage == near.usage


async def test_synchronously(start: Start) -> None:
    place = await start()

    def use() -> tuple[str, str, str]:
        with Client(place.address) as client:
            whole = client.generate(messages=HELLO, max_tokens=60).text
            with client.stream(messages=HELLO, max_tokens=60) as parts:
                streamed = "".join(part.text for part in parts)
            return whole, streamed, client.model().name

    whole, streamed, name = await in_thread(use)
    assert whole == streamed
    assert TEXT.startswith(whole)
    assert name == "org/small"


async def test_options_arrive(start: Start) -> None:
    place = await start()
    async with AsyncClient(place.address) as client:
        await client.generate(
            "hello", temperature=0.0, seed=3, stop=["x"], max_tokens=5, slo=Slo(ttft_ms=200), priority=9,
            task_type="sort", timeout_s=7.5,
        )  # fmt: skip
    [request] = place.generator.seen
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.stop) == (0.0, 3, ("x",))
    assert (request.slo, request.priority, request.task_type) == (Slo(ttft_ms=200), 9, "sort")
    assert request.timeout_s is not None
    assert 7 < request.timeout_s <= 7.5


async def test_errors_have_their_kinds_and_codes(start: Start) -> None:
    place = await start()
    async with AsyncClient(place.address, max_retries=0) as client:
        with pytest.raises(BadRequest, match="temperature must be from 0 to 2") as bad:
            await client.generate("hello", temperature=3)
        assert (bad.value.code, bad.value.status) == ("invalid_value", "INVALID_ARGUMENT")
        with pytest.raises(NotFound, match="served: org/small"):
            await client.generate("hello", model="gpt")
        place.generator.refusal = Saturated("the queue is full", retry_after_s=3)
        with pytest.raises(LimitExceeded, match="the queue is full") as full:
            await collect(client)
        assert (full.value.code, full.value.retry_after_s) == ("saturated", 3.0)
        place.generator.refusal = None
        await place.generator.allow(1)
        with pytest.raises(TimedOut):
            await client.generate("hello", timeout_s=0.2)
    with pytest.raises(Unavailable):
        async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
            await client.generate("hello")


async def test_leaving_a_stream_ends_the_request(start: Start) -> None:
    place = await start()
    await place.generator.allow(3)
    async with AsyncClient(place.address) as client:
        async with client.stream("hello") as parts:
            await anext(aiter(parts))
        await place.generator.until_idle()

    def leave() -> None:
        with Client(place.address) as client, client.stream("hello") as parts:
            next(iter(parts))

    await in_thread(leave)
    await place.generator.until_idle()
    assert set(place.generator.outcomes.values()) == {FinishReason.CANCELLED}


async def test_cancelling_the_task_ends_the_request(start: Start) -> None:
    place = await start()
    await place.generator.allow(0)
    async with AsyncClient(place.address) as client:
        task = asyncio.ensure_future(client.generate("hello"))
        await place.generator.until_active(1)
        task.cancel()
        await place.generator.until_idle()
        assert list(place.generator.outcomes.values()) == [FinishReason.CANCELLED]


async def test_cancelling_by_id(start: Start) -> None:
    place = await start(through_log=True)
    await place.generator.allow(3)
    async with AsyncClient(place.address) as client:
        stream = client.stream("hello", idempotency_key="order-1")
        await anext(stream)
        await client.cancel(stream.request_id)

        async def rest() -> None:
            async for _ in stream:
                pass

        with pytest.raises(Cancelled):
            await asyncio.wait_for(rest(), DEADLINE_S)
        await client.cancel(stream.request_id)


async def test_keys(start: Start, tmp_path: Path) -> None:
    made, key = new_key("ann", KeyLimits(), utc_now())
    path = tmp_path / "keys.json"
    with changing(path) as present:
        write_keys(path, present.add(made))
    place = await start(keys_file=path)
    async with AsyncClient(place.address) as client:
        with pytest.raises(Unauthenticated, match="send your API key"):
            await client.model()
    async with AsyncClient(place.address, api_key=key) as client:
        assert (await client.generate("hello")).text == TEXT
    assert place.generator.seen[0].tenant == "ann"


async def test_the_other_gateway_is_tried_when_one_refuses(start: Start, refusing: str) -> None:
    place = await start()
    async with AsyncClient([refusing, place.address], max_retries=0) as client:
        assert (await client.generate("hello")).text == TEXT
        assert joined(await collect(client)) == TEXT
        await client.cancel("never-known")

    def use() -> str:
        with Client(f"{refusing},{place.address}", max_retries=0) as client:
            return client.generate("hello").text + "".join(part.text for part in client.stream("hello"))

    assert await in_thread(use) == TEXT + TEXT


async def test_a_gateway_that_drains_is_left_for_the_other(start: Start) -> None:
    first, second = await start(drain_timeout_s=DEADLINE_S), await start()
    await first.generator.allow(1)
    async with AsyncClient([first.address, second.address], max_retries=0) as client:
        running = asyncio.ensure_future(collect(client))
        await first.generator.until_active(1)
        stopping = asyncio.ensure_future(first.gateway.stop())
        await asyncio.sleep(0)
        assert (await client.generate("hello")).text == TEXT
        assert len(second.generator.seen) == 1
        await first.generator.allow(None)
        assert joined(await running) == TEXT
        await asyncio.wait_for(stopping, DEADLINE_S)
        assert (await client.generate("hello")).text == TEXT, "and it is not asked again first"


async def test_a_full_gateway_is_tried_again_as_it_says(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    place = await start()
    generate = place.generator.generate

    async def refuse_the_first(request: GenerationRequest) -> AsyncIterator[Event]:
        if not refused:
            refused.append(request)
            raise Saturated("full", retry_after_s=0.1)
        async for event in generate(request):
            yield event

    refused: list[GenerationRequest] = []
    monkeypatch.setattr(place.generator, "generate", refuse_the_first)
    async with AsyncClient(place.address, max_retries=1) as client:
        assert (await client.generate("hello")).text == TEXT
    assert (len(refused), len(place.generator.seen)) == (1, 1)


async def test_a_broken_answer_goes_on_at_the_other_gateway_only_under_a_key(start: Start) -> None:
    """Both say the same under the same key, as in the pipeline. The first one's process dies in the middle."""
    for keyed in (True, False):
        first, second = await start(), await start()
        await first.generator.allow(6)
        options: Any = {"idempotency_key": "order-1"} if keyed else {}
        async with AsyncClient([first.address, second.address], max_retries=0) as client:
            stream = client.stream("hello", **options)
            parts = [await asyncio.wait_for(anext(stream), DEADLINE_S)]
            while sum(len(part.tokens) for part in parts) < 6:
                parts.append(await asyncio.wait_for(anext(stream), DEADLINE_S))
            await asyncio.wait_for(first.gateway.stop(), DEADLINE_S)
            if keyed:
                async with asyncio.timeout(DEADLINE_S):
                    parts += [part async for part in stream]
                assert joined(parts) == TEXT
                tokens = [token.index for part in parts for token in part.tokens]
                assert tokens == list(range(len(tokens)))
            else:
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(anext(stream), DEADLINE_S)
                assert second.generator.seen == []


async def test_another_request_under_the_same_key(start: Start) -> None:
    place = await start(through_log=True)
    async with AsyncClient(place.address) as client:
        first = await client.generate("hello", idempotency_key="order-1")
        assert await client.generate("hello", idempotency_key="order-1") == first
        with pytest.raises(IdempotencyConflict):
            await client.generate("goodbye", idempotency_key="order-1")
    assert len(place.generator.seen) == 1
