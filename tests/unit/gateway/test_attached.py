"""Idempotency keys in one gateway: one run, however many ask, whoever leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom.core.errors import Conflict, GreenroomError, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.gateway.requests import idempotent_runs as module
from greenroom.gateway.requests.idempotent_runs import Attached
from greenroom.text import Tokenizer
from tests import small_tokenizers
from tests.scripted_generator import DEADLINE_S, ScriptedGenerator


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(small_tokenizers.write_chat(Path(tmp_path_factory.mktemp("x"))))


@pytest.fixture
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def attached(generator: ScriptedGenerator, clock: Clock) -> AsyncIterator[Attached]:
    made = Attached(generator, max_running=4, keep_s=100, clock=clock)
    yield made
    await made.close()
    await generator.until_idle()


def request(
    name: str = "r", digest: bytes = b"same", *, keyed: bool = True, timeout_s: float = 60
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=20)
    return GenerationRequest(name, (7, 8), sampling, keyed=keyed, digest=digest, timeout_s=timeout_s)


async def all_of(attached: Attached, asked: GenerationRequest) -> list[Event]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in attached.generate(asked)]


async def until_gone(attached: Attached, name: str) -> None:
    task = attached.running(name)
    if task is not None:
        await asyncio.wait([task], timeout=DEADLINE_S)
        await asyncio.sleep(0)  # its callbacks come behind it
    assert attached.running(name) is None


async def test_without_a_key_it_passes_straight_through(attached: Attached, generator: ScriptedGenerator) -> None:
    first = await all_of(attached, request(keyed=False))
    assert await all_of(attached, request(keyed=False)) == first
    assert len(generator.seen) == 2


async def test_a_second_one_gets_all_of_the_first(attached: Attached, generator: ScriptedGenerator) -> None:
    await generator.allow(5)
    first = asyncio.ensure_future(all_of(attached, request()))
    await generator.until_active(1)
    second = asyncio.ensure_future(all_of(attached, request()))
    await generator.allow(None)
    events = await first
    assert await second == events
    assert [event.index for event in events if isinstance(event, Token)] == list(range(20))
    assert len(generator.seen) == 1


async def test_it_goes_on_when_its_client_leaves(attached: Attached, generator: ScriptedGenerator) -> None:
    await generator.allow(3)
    events = attached.generate(request())
    got = [await anext(events) for _ in range(3)]
    await events.aclose()  # type: ignore[attr-defined]
    assert list(generator.active) == ["r"]
    await generator.allow(None)
    await until_gone(attached, "r")
    assert generator.outcomes == {"r": FinishReason.LENGTH}
    assert (await all_of(attached, request()))[:3] == got
    assert len(generator.seen) == 1


async def test_something_else_under_the_same_key_is_a_conflict(
    attached: Attached, generator: ScriptedGenerator
) -> None:
    await generator.allow(1)
    events = attached.generate(request())
    await anext(events)
    with pytest.raises(Conflict, match="send this one with a key of its own"):
        await all_of(attached, request(digest=b"other"))
    await generator.allow(None)
    assert isinstance([event async for event in events][-1], Finished)
    with pytest.raises(Conflict):
        await all_of(attached, request(digest=b"other"))
    assert len(generator.seen) == 1


async def test_a_reply_is_kept_for_its_time(attached: Attached, generator: ScriptedGenerator, clock: Clock) -> None:
    first = await all_of(attached, request())
    await until_gone(attached, "r")
    clock.now = 99.0
    assert await all_of(attached, request()) == first
    assert len(generator.seen) == 1
    clock.now = 100.5
    assert await all_of(attached, request(digest=b"other")) == first
    assert len(generator.seen) == 2


async def test_the_oldest_replies_go_for_room(
    attached: Attached, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 50)
    for name in ("a", "b", "c"):  # 21 events each
        await all_of(attached, request(name))
        await until_gone(attached, name)
    await all_of(attached, request("c"))
    await all_of(attached, request("b"))
    assert len(generator.seen) == 3
    await all_of(attached, request("a"))
    assert len(generator.seen) == 4


async def test_what_failed_is_run_anew(attached: Attached, generator: ScriptedGenerator) -> None:
    generator.fail_at = 2
    events = await all_of(attached, request())
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.FAILED
    await until_gone(attached, "r")
    generator.fail_at = None
    events = await all_of(attached, request())
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("refusal", [Saturated("full"), RuntimeError("a defect")])
async def test_a_refusal_reaches_everybody_and_is_not_kept(
    attached: Attached, generator: ScriptedGenerator, refusal: Exception
) -> None:
    generator.refusal = refusal
    both = await asyncio.gather(all_of(attached, request()), all_of(attached, request()), return_exceptions=True)
    assert list(both) == [refusal, refusal]
    await until_gone(attached, "r")
    assert len(generator.seen) == 1
    generator.refusal = None
    assert len(await all_of(attached, request())) == 21


async def test_an_end_without_an_outcome_is_told(attached: Attached, generator: ScriptedGenerator) -> None:
    generator.vanish_at = 1
    with pytest.raises(GreenroomError, match="without an outcome"):
        await all_of(attached, request())


async def test_not_more_at_once_than_allowed(attached: Attached, generator: ScriptedGenerator) -> None:
    await generator.allow(0)
    running = [asyncio.ensure_future(all_of(attached, request(f"r{number}"))) for number in range(4)]
    await generator.until_active(4)
    with pytest.raises(Saturated):
        await all_of(attached, request("one more"))
    await generator.allow(None)
    await asyncio.gather(*running)


async def test_cancelling_ends_it_for_everybody(attached: Attached, generator: ScriptedGenerator) -> None:
    await generator.allow(2)
    both = [asyncio.ensure_future(all_of(attached, request())) for _ in range(2)]
    await generator.until_active(1)
    await attached.cancel("r")
    for events in await asyncio.gather(*both):
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.CANCELLED
    await until_gone(attached, "r")
    await attached.cancel("r")
    await attached.cancel("never known")
    await generator.allow(None)
    assert len(await all_of(attached, request())) == 21


async def test_one_that_is_cancelled_before_its_first_step_ends_too(
    attached: Attached, generator: ScriptedGenerator
) -> None:
    events = attached.generate(request())
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # the reader has made the run, whose task has not begun
    task = attached.running("r")
    assert task is not None
    assert generator.seen == []
    task.cancel()
    event = await asyncio.wait_for(first, DEADLINE_S)
    assert isinstance(event, Finished)
    assert event.reason is FinishReason.CANCELLED
    assert attached.running("r") is None


async def test_one_whose_time_is_over_ends_though_its_generator_does_not(
    attached: Attached, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 0.0)
    await generator.allow(2)
    events = await all_of(attached, request(timeout_s=0.05))
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, len(events)) == (FinishReason.EXPIRED, 3)
    await generator.until_idle()


async def test_a_generator_that_cancels_by_id_is_asked_to(generator: ScriptedGenerator) -> None:
    asked: list[str] = []

    class Cancelling(ScriptedGenerator):
        async def cancel(self, request_id: str) -> None:
            asked.append(request_id)

    attached = Attached(Cancelling(generator.tokenizer), max_running=4, keep_s=1)
    await attached.cancel("elsewhere")
    assert asked == ["elsewhere"]


async def test_closing_ends_what_runs(generator: ScriptedGenerator) -> None:
    attached = Attached(generator, max_running=4, keep_s=1)
    await generator.allow(0)
    reader = asyncio.ensure_future(all_of(attached, request()))
    await generator.until_active(1)
    await attached.close()
    await generator.until_idle()
    assert isinstance((await reader)[-1], Finished)
