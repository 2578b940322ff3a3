"""Several generations as one stream: order, bounds, failures, and always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.errors import InvalidConfig, Saturated
from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.gateway import GatewayConfig
from greenroom.gateway.metrics import GatewayMetrics, SequenceMeter
from greenroom.gateway.replies.choices import ChoiceAssembler, GenerationFailed, Job
from greenroom.gateway.requests import generations as module
from greenroom.gateway.requests.generations import Generations
from greenroom.text import Tokenizer
from tests import small_tokenizers
from tests.scripted_generator import DEADLINE_S, ScriptedGenerator


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(small_tokenizers.write_chat(Path(tmp_path_factory.mktemp("x"))))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def make(tokenizer: Tokenizer, registry: CollectorRegistry) -> Callable[..., Generations]:
    metrics = GatewayMetrics(registry).of("m")

    def make(generator: Any, count: int = 1, buffer: int = 8, keyed: bool = False, **sampling: Any) -> Generations:
        jobs = [
            Job(index, GenerationRequest(f"r-{index}", (7,), SamplingParams(seed=index, **sampling), keyed=keyed))
            for index in range(count)
        ]
        return Generations(
            generator,
            [(job, ChoiceAssembler(job, tokenizer, (4,))) for job in jobs],
            meter=lambda job: SequenceMeter(metrics, 1, arrived=0.0),
            buffer=buffer,
            tasks=set(),
        )

    return make


async def read(generations: Generations) -> dict[int, str]:
    texts: dict[int, str] = {}
    while not generations.done:
        for part in await generations.parts(DEADLINE_S):
            texts[part.index] = texts.get(part.index, "") + part.text
    return texts


async def test_each_choice_comes_whole_and_in_order(tokenizer: Tokenizer, make: Any) -> None:
    generator = ScriptedGenerator(tokenizer)
    async with make(generator, 3, buffer=1) as generations:
        texts = await read(generations)
    assert texts == {
        (request.sampling.seed or 0): tokenizer.decode(generator._text_of(request)) for request in generator.seen
    }
    assert len(generator.closed) == 3


async def test_a_full_buffer_holds_the_generator_back(tokenizer: Tokenizer, make: Any) -> None:
    generator = ScriptedGenerator(tokenizer)
    taken: list[int] = []

    async def counted(request: GenerationRequest) -> AsyncIterator[Event]:
        async for event in generator.generate(request):
            if isinstance(event, Token):
                taken.append(event.index)
            yield event

    class Counting:
        generate = staticmethod(counted)

    async with make(Counting(), buffer=2) as generations:
        [first, *_] = await generations.parts(DEADLINE_S)
        assert first.text
        assert len(taken) < 10


async def test_silence_gives_nothing_and_loses_nothing(tokenizer: Tokenizer, make: Any) -> None:
    generator = ScriptedGenerator(tokenizer)
    await generator.allow(0)
    async with make(generator) as generations:
        assert await generations.parts(0.01) == []
        assert await generations.parts(0.01) == []
        await generator.allow(None)
        assert (await read(generations))[0] == tokenizer.decode(generator._text_of(generator.seen[0]))


async def test_leaving_early_closes_all_of_them(tokenizer: Tokenizer, make: Any, registry: CollectorRegistry) -> None:
    generator = ScriptedGenerator(tokenizer)
    await generator.allow(2)
    async with make(generator, 4) as generations:
        await generations.parts(DEADLINE_S)
    assert sorted(generator.closed) == ["r-0", "r-1", "r-2", "r-3"]
    assert set(generator.outcomes.values()) == {FinishReason.CANCELLED}
    labels = {"model_name": "m", "finished_reason": "cancelled"}
    assert registry.get_sample_value("greenroom_request_success_total", labels) == 4


async def test_a_refusal_counts_as_no_end(tokenizer: Tokenizer, make: Any, registry: CollectorRegistry) -> None:
    generator = ScriptedGenerator(tokenizer)
    generator.refusal = Saturated("full")
    async with make(generator) as generations:
        with pytest.raises(Saturated):
            await generations.parts(DEADLINE_S)
    assert registry.get_sample_value("greenroom_num_requests_waiting", {"model_name": "m"}) == 0
    assert registry.get_sample_value("greenroom_e2e_request_latency_seconds_count", {"model_name": "m"}) == 0


async def test_abort_is_the_next_thing_read_even_with_a_full_buffer(tokenizer: Tokenizer, make: Any) -> None:
    generator = ScriptedGenerator(tokenizer)
    async with make(generator, buffer=1) as generations:
        await generator.until_active(1)
        generations.abort(GenerationFailed("stopping", FinishReason.CANCELLED))
        with pytest.raises(GenerationFailed, match="stopping"):
            await generations.parts(DEADLINE_S)
    assert len(generator.closed) == 1


async def test_an_iterator_without_aclose_will_do(tokenizer: Tokenizer, make: Any) -> None:
    generator = ScriptedGenerator(tokenizer)

    class Plain:
        def __init__(self, request: GenerationRequest) -> None:
            self._events = generator.generate(request)

        def __aiter__(self) -> Plain:
            return self

        async def __anext__(self) -> Event:
            return await anext(self._events)

    class Plainly:
        generate = staticmethod(Plain)

    async with make(Plainly()) as generations:
        assert (await read(generations))[0]


async def test_a_generator_that_does_not_close_is_reported_and_not_waited_for(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    release = asyncio.Event()

    async def stubborn(request: GenerationRequest) -> AsyncIterator[Event]:
        try:
            yield Token(0, 7)
            await asyncio.Event().wait()
        finally:
            await release.wait()

    class Stubborn:
        generate = staticmethod(stubborn)

    generations = make(Stubborn())
    async with generations:
        await generations.parts(DEADLINE_S)
    assert "generate r-0 did not close within 0.05 seconds" in caplog.text
    [task] = generations._all_tasks
    release.set()
    await asyncio.wait([task], timeout=DEADLINE_S)
    assert generations._all_tasks == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_body_bytes", 0),
        ("max_choices", 0),
        ("max_in_flight", 0),
        ("stream_buffer", 0),
        ("body_timeout_s", 0),
        ("request_timeout_s", float("inf")),
        ("slow_client_timeout_s", float("nan")),
        ("keep_alive_s", -1),
        ("drain_timeout_s", -1),
        ("drain_timeout_s", float("nan")),
        ("grpc_port", 65536),
        ("max_prompt_tokens", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: {value!r} is not allowed"):
        GatewayConfig(**{field: value})


def test_the_two_apis_do_not_share_a_port() -> None:
    """Before, this was told by the second one to listen, with a model loaded meanwhile."""
    with pytest.raises(InvalidConfig, match=r"^grpc_port: 8001 .* HTTP has that port already"):
        GatewayConfig(port=8001, grpc_port=8001)
    assert GatewayConfig(port=0, grpc_port=0).grpc_port == 0


def test_a_default_time_above_the_most_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match="request_timeout_s: 60 is not allowed; it is at most max_request_timeout_s"
    ):
        GatewayConfig(request_timeout_s=60, max_request_timeout_s=30)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gateway", ""])
def test_without_keys_only_this_machine_may_connect(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"greenroom keys add NAME.*--keys-file"):
        GatewayConfig(host=host)
    assert GatewayConfig(host=host, keys_file=tmp_path / "keys.json").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_keys_may_be_off(host: str) -> None:
    assert GatewayConfig(host=host).on_loopback


async def test_a_request_with_a_key_has_not_ended_when_its_client_leaves(
    tokenizer: Tokenizer, make: Any, registry: CollectorRegistry
) -> None:
    generator = ScriptedGenerator(tokenizer)
    await generator.allow(1)
    async with make(generator, keyed=True) as generations:
        await generations.parts(DEADLINE_S)
    labels = {"model_name": "m", "finished_reason": "cancelled"}
    assert registry.get_sample_value("greenroom_request_success_total", labels) == 0
    assert registry.get_sample_value("greenroom_num_requests_running", {"model_name": "m"}) == 0
