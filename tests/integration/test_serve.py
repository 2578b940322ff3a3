"""A real server process with the bundled model at a quarter of its experts, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from greenroom.demo import bundled_model_path
from greenroom.demo.evaluate.evaluation import CARD_SEED
from greenroom.demo.tasks import TASKS, Sample, samples
from greenroom.policies.registry import BATCH_POLICIES, EXPERT_POLICIES
from tests.integration import server as server_module
from tests.integration.server import Server, refusals_without_torch
from tests.pausing import pause
from tests.waiting import DEADLINE_S

OPTIONS = ("--expert-memory", "25%", "--policy", "lfu", "--max-running", "16")
IGNORE_EOS = {"ignore_eos": True}
PAUSE_S = 3.6
"""Longer than a worker's lease where it has a process of its own."""
CHECKED = 30  # samples a task; `make test-full` takes all of the card's


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    with Server(*OPTIONS, cache=cache) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


async def model_name(client: openai.AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


async def answer(client: openai.AsyncOpenAI, name: str, prompt: str) -> tuple[str, str]:
    reply = await client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=64
    )
    return reply.choices[0].message.content or "", reply.choices[0].finish_reason


async def outcomes(client: openai.AsyncOpenAI, drawn: list[Sample]) -> str:
    name = await model_name(client)
    places = asyncio.Semaphore(24)

    async def right(one: Sample) -> str:
        async with places:
            return "1" if await answer(client, name, one.prompt) == (one.answer, "stop") else "0"

    return "".join(await asyncio.gather(*(right(one) for one in drawn)))


async def until_idle(server: Server) -> dict[str, float]:
    """The metrics once nothing runs; raises TimeoutError where something stays."""
    async with asyncio.timeout(DEADLINE_S):
        metrics = await asyncio.to_thread(server.metrics)
        while metrics["greenroom_kv_reserved_bytes"] > 0:
            metrics = await asyncio.to_thread(server.metrics)
    return metrics


async def approximated(server: Server) -> float:
    """In tokens, by what the gateway has counted."""
    metrics = await asyncio.to_thread(server.metrics)
    return next(value for name, value in metrics.items() if name.startswith("greenroom_approximated_tokens_total"))


@pytest.mark.parametrize("count", [CHECKED, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize("task", TASKS)
async def test_answers_equal_the_model_card(client: openai.AsyncOpenAI, task: str, count: int | None) -> None:
    """Sample by sample what plain transformers found on the whole model; one in 50 may round differently there."""
    card = json.loads((bundled_model_path() / "evaluation.json").read_text())["exact_match"][task]["outcomes"]
    card = card[:count]
    ours = await outcomes(client, list(samples(task, len(card), seed=CARD_SEED, split="heldout")))
    differing = sum(a != b for a, b in zip(ours, card, strict=True))
    assert differing <= len(card) / 50
    assert ours.count("1") / len(ours) >= (0.7 if task == min_task() else 0.9) - 0.1


def min_task() -> str:
    """The task that the card allows 0.7."""
    card = json.loads((bundled_model_path() / "evaluation.json").read_text())["exact_match"]
    return str(min(card, key=lambda task: float(card[task]["exact"])))


async def test_an_exact_server_says_that_nothing_was_approximated(server: Server, client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model=await model_name(client), prompt="Kira drinks", max_tokens=4)
    assert reply.model_extra == {"approximated": 0.0}
    assert await approximated(server) == 0.0


async def test_what_was_approximated_is_said_whole_streamed_and_again(cache: Path) -> None:
    """From the engine through every service to the client; a retry under the same key is told the same."""
    options = ("--expert-memory", "25%", "--policy", "lru", "--fidelity", "paper")
    key = {"Idempotency-Key": "once"}
    with Server(*options, cache=cache) as near:
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            ask: Any = partial(
                client.completions.create, model=await model_name(client), prompt="Kira drinks", max_tokens=8
            )
            reply = await ask(extra_headers=key)
            share = (reply.model_extra or {})["approximated"]
            assert 0 < share <= 1
            stream = await ask(extra_headers=key, stream=True, stream_options={"include_usage": True})
            *_, last = [part async for part in stream]
            assert last.model_extra == {"approximated": share}
            assert reply.usage is not None
            rows = reply.usage.total_tokens - 1
            assert await approximated(near) == pytest.approx(2 * rows * share, rel=1e-4), "each call that had the end"


def test_a_server_that_is_not_ready_in_time_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "START_TIMEOUT_S", 0.01)
    late = Server(cache=cache)
    with pytest.raises(AssertionError, match="was not ready within"):
        late.__enter__()
    assert late.process.returncode is not None


async def test_fifty_streams_a_third_cancelled_leave_nothing_behind(server: Server, client: openai.AsyncOpenAI) -> None:
    name = await model_name(client)
    expected = await answer(client, name, next(samples("converse", 1, seed=3)).prompt)

    async def one(number: int) -> str:
        stream = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": next(samples("converse", 1, seed=3)).prompt}],
            temperature=0, max_tokens=64, stream=True,
        )  # fmt: skip
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if number % 3 == 0 and len(text) > number % 7:
                await stream.close()
                return "cancelled"
        return text

    texts = await asyncio.gather(*(one(number) for number in range(50)))
    assert texts.count("cancelled") == 17
    assert {text for text in texts if text != "cancelled"} == {expected[0]}
    metrics = await until_idle(server)
    assert metrics["greenroom_batch_requests_running"] == metrics["greenroom_batch_requests_waiting"] == 0
    assert metrics["greenroom_experts_resident"] <= metrics['greenroom_expert_slots{tier="device"}']
    for phase in ("prefill", "decode"):
        hits, lookups = (metrics[f'greenroom_expert_{name}_total{{phase="{phase}"}}'] for name in ("hits", "lookups"))
        assert hits < lookups
    assert metrics["greenroom_failed_audits_total"] == 0


@pytest.mark.parametrize("pauses", [1, pytest.param(3, marks=pytest.mark.full)])
async def test_pauses_longer_than_a_lease_end_no_request(
    server: Server, client: openai.AsyncOpenAI, pauses: int
) -> None:
    """As of a laptop that sleeps, or a container that is throttled: scheduler and worker stand still together."""
    name = await model_name(client)
    ask: Any = partial(
        client.completions.create, model=name, max_tokens=96, temperature=0, stream=True, extra_body=IGNORE_EOS
    )
    streams = [await ask(prompt=f"Kira drinks {number}") for number in range(16)]
    first = aiter(streams[0])
    for _ in range(pauses):
        await anext(first)
        await asyncio.to_thread(pause, server.process.pid)
        await asyncio.sleep(PAUSE_S)
        server.process.send_signal(signal.SIGCONT)

    async def reason(stream: Any) -> str | None:
        reasons: list[str | None] = [part.choices[0].finish_reason async for part in stream]
        return reasons[-1]

    assert await asyncio.gather(*(reason(stream) for stream in [first, *streams[1:]])) == ["length"] * 16
    assert not [line for line in server.log if "dead letters" in line or "is lost under" in line]


REFUSED = [
    (("--policy", "magic"), f"known: {', '.join(sorted(EXPERT_POLICIES))}"),
    (("--expert-memory", "plenty"), "write a size such as 2GiB"),
    (("--kv-memory", "10%"), "kv_memory"),
    (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    (("--policy-options", "{"), "this is no JSON"),
    (("--policy", "lru", "--policy-options", '{"x": 1}'), "lru takes no options"),
    (("--batching", "magic"), f"known: {', '.join(sorted(BATCH_POLICIES))}"),
    (("--batching", "fcfs:hold=1"), "fcfs takes no options"),
    (("--batching", "phases:keep=1"), "known: apart, hold"),
    (("--batching", "phases:hold=much"), "hold: 'much' is not allowed; a number"),
    (("--batching", "phases:hold=-1"), "hold: -1 is not allowed"),
    (("--batching", "fcfs:hold"), "write options as NAME:OPTION=VALUE"),
    (("--tokens-per-step", "many"), "'many': write a number of rows, or auto"),
    (("--dtype", "int4"), "auto, bfloat16, float16, float32"),
    (("--max-running", "0"), "max_running"),
    (("--max-queue-wait", "-1"), "max_queue_wait_s: -1.0 is not allowed"),
    (("--port", "99999"), "port"),
    (("--otlp-endpoint", "localhost:4317"), "otlp_endpoint"),
    (("--otlp-endpoint", "ftp://localhost"), "otlp_endpoint"),
]


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, ...], str]:
    """To each of the refused options."""
    refused = [arguments for arguments, _ in REFUSED]
    return dict(zip(refused, refusals_without_torch(refused), strict=True))


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_settings_are_refused_with_what_to_do(
    said: dict[tuple[str, ...], str], arguments: tuple[str, ...], message: str
) -> None:
    """At once: the import of torch takes seconds, and is not waited for."""
    assert message in said[arguments]
    assert "Traceback" not in said[arguments]


# The server that all tests share ends here.


def test_sigterm_drains_and_the_next_start_is_warm(cache: Path, server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chunks = client.completions.create(
            model="greenroom-understudy", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(chunks)
        server.process.terminate()
        assert sum(1 for _ in chunks) >= 100, "a running request is finished"
    assert server.process.wait(60) == 0
    remembered = next((cache / "packs").glob("*.resident.json"))
    kept = json.loads(remembered.read_text())["experts"]
    with Server(*OPTIONS, cache=cache) as second:
        assert second.terminate() == 0
    assert sorted(json.loads(remembered.read_text())["experts"]) == sorted(kept), "nothing ran, so nothing moved"
