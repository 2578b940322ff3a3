"""Of two gateways and two workers one is killed, poisoned or restarted. No client is the worse for it."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from greenroom.core.generation import FinishReason
from greenroom.demo.tasks import TASKS, samples
from greenroom.gateway.requests.call_headers import base_id
from tests.integration.cluster import Cluster, Process, running
from tests.integration.pipeline.load import Clients, check
from tests.integration.pipeline.topics import Topics, completed, until
from tests.kafka.broker import Broker

_LOG = logging.getLogger(__name__)
MODEL = "greenroom-understudy"
PROMPTS = [sample.prompt for task in TASKS for sample in samples(task, 2, seed=11)]
LONG = {"model": MODEL, "temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
POISON = "POISON-1"
AWAY_S = 13.0
"""Longer than a gateway waits for an acknowledgement."""
PROMPTLY_S = 60.0


@pytest.fixture(scope="module")
def cluster(
    kafka_broker: Broker, cache: Path, tmp_path_factory: pytest.TempPathFactory, module_prefix: str
) -> Iterator[Cluster]:
    options = {
        "worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "8"],
        "gateway": ["--linger", "20"],  # above the 15 s for which aiohttp's clients keep idle connections
    }
    made = Cluster(
        tmp_path_factory.mktemp("failures"),
        kafka_broker.address,
        prefix=module_prefix,
        cache=cache,
        gateways=2,
        workers=2,
        options=options,
        environment={"GREENROOM_FAULT": f"worker:poison:{POISON}"},
    )
    with running(made):
        yield made
        made.check_logs()


@pytest.fixture
async def clients(cluster: Cluster) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One for each gateway."""
    made = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) for url in cluster.urls
    ]
    yield made
    for client in made:
        await client.close()


def said(prompt: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": prompt}]


async def answer(client: openai.AsyncOpenAI, prompt: str, key: str | None = None) -> str:
    headers = {"Idempotency-Key": key} if key else {}
    reply = await client.chat.completions.create(messages=said(prompt), extra_headers=headers, **LONG)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, key: str | None = None) -> tuple[int, str]:
    """Status, and the text or the error's code."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0.0}
    headers = {} if key is None else {"Idempotency-Key": key}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        reply = await response.json()
        return response.status, reply["choices"][0]["text"] if response.status == 200 else reply["error"]["code"]


async def code_of(refused: asyncio.Future[str] | asyncio.Task[str]) -> int:
    with pytest.raises(openai.APIStatusError) as error:
        await refused
    return error.value.status_code


async def breaks_off(stream: AsyncIterator[object]) -> bool:
    try:
        async for _ in stream:
            pass
    except Exception:  # of whichever HTTP client this version of openai brings
        return True
    return False


def runs(cluster: Cluster) -> float:
    """How many requests the workers have begun."""
    return sum(cluster[f"worker{number}"].metric("greenroom_worker_runs_total") for number in (0, 1))


def new_key() -> str:
    return f"key-{uuid.uuid4().hex}"


def id_of(key: str) -> str:
    return f"{base_id('', key)}-0"


async def test_one_key_sent_to_two_gateways_at_once_runs_once(
    cluster: Cluster, topics: Topics, clients: list[openai.AsyncOpenAI]
) -> None:
    expected, key = await answer(clients[0], PROMPTS[0]), new_key()
    before = runs(cluster)
    texts = await asyncio.gather(*(answer(client, PROMPTS[0], key) for client in clients))
    assert texts == [expected, expected]
    await topics.journal.catch_up()
    assert len({outcome.attempt for outcome in topics.journal.of(id_of(key))}) == 1
    assert await answer(clients[0], PROMPTS[0], key) == await answer(clients[1], PROMPTS[0], key) == expected
    assert runs(cluster) == before + 1


async def test_another_body_under_a_key_is_a_conflict_at_both_gateways(
    cluster: Cluster, clients: list[openai.AsyncOpenAI]
) -> None:
    """While the first runs, and after."""
    key = new_key()
    before = runs(cluster)
    first = asyncio.create_task(answer(clients[0], PROMPTS[1], key))
    await until(lambda: runs(cluster) == before + 1, "it has begun")
    others = [asyncio.create_task(answer(client, PROMPTS[2], key)) for client in clients]
    assert [await code_of(other) for other in others] == [409, 409]
    assert await first == await answer(clients[1], PROMPTS[1], key)
    others = [asyncio.create_task(answer(client, PROMPTS[2], key)) for client in clients]
    assert [await code_of(other) for other in others] == [409, 409]
    assert runs(cluster) == before + 1


@pytest.mark.timeout(240)
async def test_a_gateway_is_killed_and_a_retry_at_the_other_gets_the_result(
    cluster: Cluster, topics: Topics, clients: list[openai.AsyncOpenAI]
) -> None:
    prompts = PROMPTS[3:6]
    expected = await asyncio.gather(*(answer(clients[1], prompt) for prompt in prompts))
    before, keys = runs(cluster), [new_key(), new_key(), None]
    streams = [
        await clients[0].chat.completions.create(  # type: ignore[call-overload]
            messages=said(prompt), extra_headers={"Idempotency-Key": key} if key else {}, stream=True, **LONG
        )
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    started = [await anext(aiter(stream)) for stream in streams]
    cluster["gateway0"].kill()
    for stream in streams:
        assert await breaks_off(stream)
    retries = [answer(clients[1], prompt, key) for prompt, key in zip(prompts, keys, strict=True) if key is not None]
    assert await asyncio.gather(*retries) == expected[:2]
    for chunk in started:  # the one without a key too, though no client will ask for it
        assert completed(await topics.journal.outcome(f"{chunk.id.removeprefix('chatcmpl-')}-0"))
    assert runs(cluster) == before + 3
    cluster["gateway0"].start()
    await asyncio.to_thread(cluster["gateway0"].wait_ready)
    assert await answer(clients[0], prompts[0], keys[0]) == expected[0], "the one that is back knows it as well"
    assert runs(cluster) == before + 3


@asynccontextmanager
async def kept(cluster: Cluster) -> AsyncIterator[list[int]]:
    """Workers that die are started again, as a container's restart policy does. Gives how each ended."""
    died: list[int] = []

    async def keep() -> None:
        while True:
            for worker in (cluster["worker0"], cluster["worker1"]):
                if not worker.running:
                    died.append(worker.wait_end())
                    worker.start()
            await asyncio.sleep(0.1)

    keeping = asyncio.create_task(keep())
    try:
        yield died
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.full  # by itself: tests/unit/protocol/test_exploration.py, and tests/unit/scheduler/test_suspects.py
@pytest.mark.timeout(300)
async def test_a_request_that_kills_every_worker_it_meets_ends_as_failed_and_the_rest_goes_on(
    cluster: Cluster, topics: Topics, clients: list[openai.AsyncOpenAI]
) -> None:
    innocent = PROMPTS[:6]
    expected = await asyncio.gather(*(answer(clients[0], prompt) for prompt in innocent))
    key = new_key()
    async with kept(cluster) as died:
        beside = [asyncio.create_task(answer(clients[n % 2], prompt)) for n, prompt in enumerate(innocent)]
        poison = asyncio.create_task(answer(clients[0], f"Drink this {POISON}.", key))
        assert await code_of(poison) == 500
        assert await asyncio.gather(*beside) == expected
        outcome = await topics.journal.outcome(id_of(key))
    assert outcome.reason is FinishReason.FAILED
    assert "3 workers" in outcome.message
    assert died == [-signal.SIGKILL] * 3, "nothing else died, and it was not tried a fourth time"
    [letter] = [letter for letter in await topics.dead_letters() if letter.request_id == id_of(key)]
    assert letter.reason == outcome.message
    assert POISON.encode() in (letter.payload or b"")
    for worker in (cluster["worker0"], cluster["worker1"]):
        await asyncio.to_thread(worker.wait_ready)


async def completion(client: openai.AsyncOpenAI, **asked: Any) -> str:
    """Streamed, so that the client has had part of it when its worker dies."""
    stream = await client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=100, stream=True, **asked)
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


@pytest.mark.full  # by itself: tests/contract/batching/test_prefix.py
@pytest.mark.timeout(480)
async def test_a_text_under_penalties_is_the_same_when_its_worker_is_killed_in_the_middle(
    cluster: Cluster, clients: list[openai.AsyncOpenAI]
) -> None:
    """What the client has had counts as generated, not as prompt: for penalties, and for ``min_tokens``."""
    changes: dict[str, Any] = {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.3,
        "logit_bias": {"40": 4.0, "300": -100.0},
        "extra_body": {"repetition_penalty": 1.1, "min_tokens": 70},
    }
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 7}]
    plain = [await completion(clients[0], **one) for one in asked]
    expected = [await completion(clients[0], **one, **changes) for one in asked]
    assert not set(plain) & set(expected), "else nothing is shown"
    workers = [cluster["worker0"], cluster["worker1"]]
    for worker in workers:
        assert await asyncio.to_thread(worker.terminate) == 0, worker.log()[-4000:]
    workers[0].start(GREENROOM_FAULT="worker:after-token:80")
    await asyncio.to_thread(workers[0].wait_ready)
    again = [asyncio.create_task(completion(clients[0], **one, **changes)) for one in asked]
    assert await asyncio.to_thread(workers[0].wait_end) == -signal.SIGKILL
    for worker in workers:
        worker.start()
    assert await asyncio.gather(*again) == expected
    for worker in workers:
        await asyncio.to_thread(worker.wait_ready)
    had = sum(worker.metric("greenroom_worker_prefix_tokens_total") for worker in workers)
    assert 40 < had <= 80, "both went on behind what their clients had"


async def restart(process: Process) -> None:
    assert await asyncio.to_thread(process.terminate) == 0, process.log()[-4000:]
    process.start()
    await asyncio.to_thread(process.wait_ready)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("last", "rounds"),
    [
        pytest.param(("gateway0", "worker0"), 1, id="a gateway and a worker"),  # the two that clients' requests are at
        pytest.param("0", 1, id="the first of each kind", marks=pytest.mark.full),
        pytest.param("", 4, id="all, four times", marks=pytest.mark.full),
    ],
)
async def test_a_rolling_restart_fails_no_request(cluster: Cluster, last: str | tuple[str, ...], rounds: int) -> None:
    """Of a client that tries the other gateway when one refuses; without idempotency keys. ``last``: how the names of
    the processes that are restarted end."""
    over = False

    async def roll() -> None:
        nonlocal over
        for _ in range(rounds):
            for name, process in cluster.processes.items():
                if name.endswith(last):
                    await restart(process)
        over = True

    async with Clients(cluster.urls, cluster.grpc_addresses, max_tokens=24, model=MODEL) as load:
        undisturbed = await load.poisson(PROMPTS, 20.0, seed=1)
        expected = {call.prompt: call.text for call in undisturbed}
        check(undisturbed, expected)
        calls, _ = await asyncio.gather(load.poisson(PROMPTS, 6.0, seed=2, enough=lambda sent: over), roll())
    assert len(calls) > len(PROMPTS)
    try:
        check(calls, expected)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.logs()}") from None


@pytest.mark.full  # by itself: tests/unit/gateway/pipeline/test_pipeline_appends.py
@pytest.mark.timeout(300)
async def test_keyed_requests_that_are_not_sent_again_hold_up_no_others(
    cluster: Cluster, topics: Topics, mortal_broker: Broker
) -> None:
    """The broker is away for longer than an append may take. All of them are told 503, and land when it is back."""
    url, prompt, keys = cluster.urls[0], PROMPTS[0], [new_key() for _ in range(40)]
    before, known = runs(cluster), len(topics.journal.outcomes)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        status, text = await ask(session, url, prompt)
        assert status == 200
        mortal_broker.pause()
        try:
            back = asyncio.get_running_loop().call_later(AWAY_S, mortal_broker.resume)
            told = await asyncio.gather(*(ask(session, url, prompt, key) for key in keys))
        finally:
            back.cancel()
            mortal_broker.resume()
        assert {status for status, _ in told} == {503}, told
        assert "unknown_acknowledgement" in {code for _, code in told}
        began = time.monotonic()
        async with asyncio.timeout(PROMPTLY_S):
            while (await ask(session, url, prompt)) != (200, text):
                _LOG.info("not served yet, %.1f s after the broker was back", time.monotonic() - began)
            assert {await ask(session, url, prompt) for _ in range(5)} == {(200, text)}
        _LOG.info("served %.1f s after the broker was back", time.monotonic() - began)
        async with asyncio.timeout(PROMPTLY_S):
            again = await asyncio.gather(*(ask(session, url, prompt, key) for key in keys))
        assert set(again) == {(200, text)}
    await topics.journal.catch_up()
    written = topics.journal.outcomes[known:]
    assert {outcome.reason for outcome in written} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert 0 < runs(cluster) - before <= len(written) + len(keys)
