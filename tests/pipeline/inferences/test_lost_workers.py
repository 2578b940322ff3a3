"""Workers that are killed over a long queue: only what they were executing counts a loss, and all is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.messages import JournalRecord, Lost, ModelCard, Outcome, decode, encode
from greenroom.fabric.announced_server import ServedEndpoint
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import LocalDialer, LocalEndpoint
from greenroom.fabric.topics import JOURNAL, MEMBERS, Topics, all_topics
from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.gateway.service import GatewayService
from greenroom.scheduler.config import PoolConfig, SchedulerConfig
from greenroom.scheduler.pool import Pool
from greenroom.scheduler.service import SchedulerService
from greenroom.tasktype import TaskTypeConfig, TaskTypeMetrics, TaskTypeService
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from greenroom.worker.inference_engine import TAKES_AT_ONCE, InferenceEngine
from greenroom.worker.inference_twin import InferenceTwin, twin_card
from greenroom.worker.service import WorkerService
from greenroom.worker.service_config import ServiceConfig
from greenroom.worker.servicer import WorkerServicer
from tests.pipeline.inferences.conftest import MODEL, body, outputs_of
from tests.pipeline.inferences.images import png
from tests.pipeline.inferences.test_infer import said
from tests.waiting import DEADLINE_S, until

LEASE_MS = 5_000.0
"""So long that a busy event loop is no loss."""
TTL_MS = 3_600_000
CALLS, KILLS, EXECUTED = 16, 3, 8
batches_of = pytest.mark.parametrize("batch", [20, pytest.param(125, marks=pytest.mark.full)])
"""Images a call: 320 requests are queued, or 2,000."""


class Worker:
    """One that can be killed: its calls break, it says nothing more, and does not take its leave."""

    def __init__(self, name: str, cluster: Cluster, engine: InferenceEngine, card: ModelCard) -> None:
        self.name = name
        config = ServiceConfig(instance=name, max_running=TAKES_AT_ONCE, ttl_ms=TTL_MS)
        log, dialer = cluster.log, cluster.dialer
        self.service = WorkerService(config, engine, card, log, dialer, cluster.directory)
        self._server = dialer.serve(f"{name}:1", [WorkerServicer(self.service)])
        self._log = log

    async def start(self) -> None:
        await self.service.start()
        member = self.service.member()
        record = type(member)(
            member=member.member, instance=self.name, address=f"{self.name}:1", ttl_ms=TTL_MS, model=member.model
        )
        await self._log.append(MEMBERS, encode(record), key=self.name.encode())

    async def kill(self) -> None:
        await self._server.kill()
        await self.service.tasks.stop()


class Cluster:
    """All services in this process, with leases that run out."""

    def __init__(self) -> None:
        self.log = MemoryLog(MemoryBroker())
        self.dialer = LocalDialer()
        self.directory = Directory(self.log)
        registry = CollectorRegistry()
        extractor = KeywordExtractor(load_profile(None))
        config = SchedulerConfig(pool=PoolConfig(max_waiting=TAKES_AT_ONCE, lease_ms=LEASE_MS), ttl_ms=TTL_MS)
        self.scheduler = SchedulerService(
            config, instance="s", log=self.log, dialer=self.dialer, directory=self.directory, policy=config.make_policy
        )
        pipeline = Pipeline(PipelineConfig(ttl_ms=TTL_MS), instance="g", log=self.log, directory=self.directory)
        front = GatewayConfig(port=0, drain_timeout_s=0)
        self.gateway = GatewayService(Gateway(front, pipeline, None, registry))
        self.parts: list[Any] = [
            TaskTypeService(
                TaskTypeConfig(), self.log, extractor, TaskTypeMetrics(registry, extractor.names, extractor.name)
            ),
            self.scheduler,
            ServedEndpoint("tokens", LocalEndpoint(self.dialer, "g"), [pipeline.tokens], owner=pipeline),
            pipeline,
            self.gateway,
        ]

    @property
    def pool(self) -> Pool:
        return self.scheduler.runners[0].pool

    async def worker(self, name: str, engine: InferenceEngine, card: ModelCard) -> Worker:
        worker = Worker(name, self, engine, card)
        await worker.start()
        await until(lambda: name in self.pool.workers and self.pool.workers[name].listed, f"{name} is known")
        return worker

    async def journal(self) -> list[JournalRecord]:
        async with self.log.reader(JOURNAL, 0) as reader:
            end = await reader.end()
            records: list[JournalRecord] = []
            while reader.position < end:
                records += [decode(one.value or b"", JournalRecord) for one in await reader.poll(1.0)]
            return records


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    async with AsyncExitStack() as stack:
        for entered in (made.log, made.dialer):
            await stack.enter_async_context(entered)
        await made.log.ensure(all_topics(Topics(request_partitions=1)))
        await stack.enter_async_context(made.directory)
        for part in made.parts:
            await part.start()
            stack.push_async_callback(part.stop)
        await until(lambda: 0 in made.scheduler.runners)
        yield made


async def queued(engine: InferenceEngine, requests: int, executed: int) -> None:
    """All are in the engine, but for those that were executed at two kills: they wait until they can run alone."""
    least = requests - executed
    await until(lambda: engine.state().waiting >= least, "all wait in the engine")


async def killed(cluster: Cluster, worker: Worker, executing: frozenset[str]) -> None:
    """After the scheduler has heard what it is executing."""
    heard = cluster.pool.workers[worker.name]
    await until(lambda: heard.state.executing == executing, "the scheduler knows")
    await worker.kill()


async def check_losses(cluster: Cluster, requests: int, executed: list[frozenset[str]]) -> None:
    """Each kill counts for what was being executed, and every request has one outcome."""
    records = await cluster.journal()
    lost = [record for record in records if isinstance(record, Lost)]
    assert [frozenset(name for name, _ in one.attempts) for one in lost] == executed
    assert not any(one.unsure for one in lost)
    assert len([record for record in records if isinstance(record, Outcome)]) == requests


@pytest.mark.timeout(240)
@batches_of
async def test_three_kills_over_a_long_queue_and_all_are_served(cluster: Cluster, batch: int) -> None:
    def twin() -> InferenceTwin:
        return InferenceTwin(twin_card(MODEL), held=True)

    engine = twin()
    worker = await cluster.worker("w0", engine, engine.card)
    await until(lambda: cluster.gateway.unready is None)
    url = f"http://127.0.0.1:{cluster.gateway.port}/v2/models/{MODEL}/infer"
    batches = [[png(tail=b"%d.%d" % (call, place)) for place in range(batch)] for call in range(CALLS)]

    async def ask(http: aiohttp.ClientSession, images: list[bytes]) -> Any:
        async with http.post(url, json=body(images)) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    executed = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http:
        calls = [asyncio.create_task(ask(http, images)) for images in batches]
        for kill in range(KILLS):
            await queued(engine, CALLS * batch, EXECUTED)
            executed.append(frozenset(engine.begin_batch()))
            await killed(cluster, worker, executed[-1])
            engine = twin()
            worker = await cluster.worker(f"w{kill + 1}", engine, engine.card)
        await queued(engine, CALLS * batch, EXECUTED)
        engine.release()
        replies = await asyncio.gather(*calls)
    for images, reply in zip(batches, replies, strict=True):
        assert outputs_of(reply)["label"]["data"] == [said(image).label for image in images]
    await check_losses(cluster, CALLS * batch, executed)
    await worker.kill()
