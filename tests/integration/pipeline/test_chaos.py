"""Nothing lost, nothing twice: processes killed and paused under load, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from greenroom.core.generation import FinishReason
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import JournalRecord, Outcome, decode
from greenroom.demo.tasks import TASKS, samples
from tests.integration.cluster import SESSION_S, Cluster, running
from tests.integration.pipeline.load import Call, Clients
from tests.kafka.broker import Broker

_LOG = logging.getLogger(__name__)
MODEL = "greenroom-understudy"
MAX_TOKENS = 24
LEASE_S = 3.0


def prompts(distinct: int) -> list[str]:
    return [sample.prompt for task in TASKS for sample in samples(task, distinct // len(TASKS), seed=7)]


async def in_thread(do: Callable[[], object]) -> None:
    await asyncio.to_thread(do)


class Chaos:
    """What is done to the cluster, in a random order at random moments."""

    def __init__(self, cluster: Cluster, broker: Broker, seed: int) -> None:
        self._cluster = cluster
        self._broker = broker
        self._random = random.Random(seed)
        self.done: list[str] = []
        self.over = False

    def acts(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        return [
            ("kill a worker", lambda: self._kill("worker0")),
            ("kill the active scheduler", lambda: self._kill(self._active_scheduler())),
            ("kill tasktype", lambda: self._kill("tasktype0")),
            ("kill tasktype between append and commit", self._fault_in_tasktype),
            ("kill the predictor", lambda: self._kill("predictor0")),
            ("kill the broker", self._kill_broker),
            ("pause a worker past its lease", lambda: self._pause("worker1", LEASE_S + 2)),
            (
                "pause the active scheduler past its session",
                lambda: self._pause(self._active_scheduler(), SESSION_S + 4),
            ),
        ]

    async def run(self, every_s: float) -> None:
        acts = self.acts()
        self._random.shuffle(acts)
        for name, act in acts:
            await asyncio.sleep(self._random.uniform(0.3, 1.0) * every_s)
            _LOG.info("%s", name)
            await act()
            self.done.append(name)
        self.over = True

    def _active_scheduler(self) -> str:
        held = {
            name: process.log().rfind("claiming it")
            for name, process in self._cluster.processes.items()
            if name.startswith("scheduler")
        }
        # Whoever claimed last has the newest line; logs are stamped, so compare the stamps.
        stamps = {name: self._cluster[name].log()[:at].rsplit("\n", 1)[-1] for name, at in held.items() if at >= 0}
        return max(stamps, key=lambda name: stamps[name], default="scheduler0")

    async def _kill(self, name: str) -> None:
        process = self._cluster[name]
        await in_thread(process.kill)
        await asyncio.sleep(self._random.uniform(0, 1))
        await in_thread(process.start)
        await in_thread(process.wait_ready)

    async def _fault_in_tasktype(self) -> None:
        process = self._cluster["tasktype0"]
        await in_thread(process.kill)
        process.start(GREENROOM_FAULT="tasktype:after-append:5")
        await in_thread(process.wait_end)
        await in_thread(process.start)
        await in_thread(process.wait_ready)

    async def _kill_broker(self) -> None:
        await in_thread(self._broker.kill)
        await asyncio.sleep(self._random.uniform(0, 1))
        await in_thread(self._broker.start)

    async def _pause(self, name: str, seconds: float) -> None:
        self._cluster[name].pause()
        await asyncio.sleep(seconds)
        self._cluster[name].resume()
        await in_thread(self._cluster[name].wait_ready)


async def outcomes(broker: Broker, prefix: str) -> dict[str, Outcome]:
    """What a reader of the whole journal finds."""
    from greenroom.fabric.log.config import LogConfig
    from greenroom.fabric.log.kafka import KafkaLog

    found: dict[str, Outcome] = {}
    fold = JournalFold()
    async with KafkaLog(LogConfig(brokers=(broker.address,), prefix=prefix)) as log, log.reader("journal", 0) as reader:
        end = await reader.end()
        while reader.position < end:
            for record in await reader.poll(1.0):
                content: JournalRecord = decode(record.value or b"", JournalRecord)
                if fold.read(record.offset, content) is Verdict.COUNTS and isinstance(content, Outcome):
                    found.setdefault(content.request_id, content)
    return found


def check(calls: list[Call], expected: dict[str, str]) -> None:
    for call in calls:
        assert call.end in ("stop", "length"), f"request {call.number} ({call.way}) ended with {call.end!r}"
        assert call.text == expected[call.prompt], f"request {call.number} ({call.way}) has another text"
        if call.way == "grpc":
            assert call.indices == list(range(len(call.indices))), f"request {call.number}: {call.indices}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("requests", "rate", "every_s"), [(300, 8.0, 1.5), pytest.param(1500, 8.0, 8.0, marks=pytest.mark.full)]
)
async def test_nothing_is_lost_and_nothing_twice(
    own_broker: Broker, prefix: str, cache: Path, tmp_path: Path, requests: int, rate: float, every_s: float
) -> None:
    options = {"worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "8"]}
    cluster = Cluster(
        tmp_path, own_broker.address, prefix=prefix, cache=cache, gateways=2, schedulers=2, workers=2, options=options
    )
    with running(cluster):
        async with Clients(cluster.urls, cluster.grpc_addresses, max_tokens=MAX_TOKENS, model=MODEL) as clients:
            distinct = sorted(set(prompts(30)))
            undisturbed = await clients.poisson(distinct, 20.0, seed=1)
            expected = {call.prompt: call.text for call in undisturbed}
            check(undisturbed, expected)
            chaos = Chaos(cluster, own_broker, seed=requests)
            disturbed, _ = await asyncio.gather(
                clients.poisson(distinct, rate, seed=2, enough=lambda sent: chaos.over and sent >= requests),
                chaos.run(every_s),
            )
            _LOG.info("did %s; refused and sent again: %d", chaos.done, sum(call.refused for call in disturbed))
            try:
                check(disturbed, expected)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{cluster.logs()}") from None
        written = await outcomes(own_broker, prefix)
        good = [outcome for outcome in written.values() if outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)]
        # What was refused with an unknown acknowledgement may have run as well, and was sent again.
        assert len(good) >= len(disturbed) + len(distinct)
        assert not [outcome for outcome in written.values() if outcome.reason is FinishReason.FAILED]


AWAY_S = 13.0
"""Longer than a gateway waits for an acknowledgement."""
PROMPTLY_S = 60.0


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, key: str | None = None) -> tuple[int, str]:
    """Status, and the text or the error's code."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
    headers = {} if key is None else {"Idempotency-Key": key}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        reply = await response.json()
        return response.status, reply["choices"][0]["text"] if response.status == 200 else reply["error"]["code"]


@pytest.mark.timeout(300)
async def test_keyed_requests_that_nobody_sends_again_block_nobody(
    own_broker: Broker, prefix: str, cache: Path, tmp_path: Path
) -> None:
    """The broker is away for longer than an append may take: all of them are told 503, and land when it is back."""
    options = {"worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "8"]}
    cluster = Cluster(tmp_path, own_broker.address, prefix=prefix, cache=cache, predictors=0, options=options)
    prompt, keys = prompts(30)[0], [f"key-{number}" for number in range(40)]
    with running(cluster):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            [url] = cluster.urls
            status, text = await ask(session, url, prompt)
            assert status == 200
            own_broker.pause()
            try:
                back = asyncio.get_running_loop().call_later(AWAY_S, own_broker.resume)
                told = await asyncio.gather(*(ask(session, url, prompt, key) for key in keys))
            finally:
                back.cancel()
                own_broker.resume()
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
        written = await outcomes(own_broker, prefix)
        assert {outcome.reason for outcome in written.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
        assert 0 < cluster["worker0"].metric("greenroom_worker_runs_total") <= len(written) + len(keys)
