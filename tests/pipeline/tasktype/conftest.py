"""Task-type extraction on a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.generation import SamplingParams
from greenroom.core.messages import Message, Request, TaskRecord, decode, encode
from greenroom.fabric.log import Record, Topic
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.tasktype import TaskTypeConfig, TaskTypeMetrics, TaskTypeService
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from tests.pipeline.troubled_log import TroubledLog
from tests.waiting import DEADLINE_S as DEADLINE_S
from tests.waiting import until

PARTITIONS = 3
POOLS = 2
CONFIG = TaskTypeConfig(
    commit_every_s=0.01, retry_s=0.001, max_retry_s=0.01, revoke_s=1.0, append_timeout_s=1.0, lag_every_s=0.02
)


def request(
    number: int, *, pool: int | None = None, prompt: str = "Summarise this", task_type: str | None = None
) -> Request:
    return Request(
        request_id=f"r{number}",
        pool=number % POOLS if pool is None else pool,
        model="m",
        prompt_ids=(1,),
        sampling=SamplingParams(),
        accepted_ms=0,
        deadline_ms=2**40,
        prompt=prompt,
        task_type=task_type,
    )


@dataclass
class Running:
    """One instance; ``task`` is its ``run``."""

    service: TaskTypeService
    registry: CollectorRegistry
    task: asyncio.Task[None]
    log: TroubledLog

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"greenroom_tasktype_{name}", labels)
        assert value is not None, (name, labels)
        return value

    async def stop(self) -> None:
        self.service.end(1.0)
        await asyncio.wait_for(self.task, DEADLINE_S)

    async def kill(self) -> None:
        """As if the process had died: nothing more is appended or committed."""
        self.log.dead = True
        self.task.cancel()
        await asyncio.wait([self.task], timeout=DEADLINE_S)
        assert self.task.done()


@dataclass
class World:
    """The log, and the instances that run on it."""

    broker: MemoryBroker = field(default_factory=MemoryBroker)
    instances: list[Running] = field(default_factory=list)

    @property
    def log(self) -> MemoryLog:
        return MemoryLog(self.broker)

    async def start(
        self,
        *,
        config: TaskTypeConfig = CONFIG,
        log: TroubledLog | None = None,
        after_append: Callable[[], None] | None = None,
    ) -> Running:
        registry = CollectorRegistry()
        extractor = KeywordExtractor(load_profile())
        metrics = TaskTypeMetrics(registry, extractor.names, extractor.name)
        log = log or TroubledLog(self.broker)
        service = TaskTypeService(config, log, extractor, metrics, after_append=after_append)
        running = Running(service, registry, asyncio.create_task(service.run()), log)
        self.instances.append(running)
        return running

    async def send(self, message: Message | bytes | None, key: bytes | None = b"?") -> Record:
        """To ``requests``, as a gateway does; the record as it landed."""
        if isinstance(message, Message) and key == b"?":
            key = message.request_id.encode()  # type: ignore[attr-defined]
        value = encode(message) if isinstance(message, Message) else message
        position = await self.log.append("requests", value, key=key, headers=[("traceparent", b"00-ab")])
        return Record("requests", position.partition, position.offset, position.timestamp_ms, key, value)

    async def read(self, topic: str, partition: int, count: int) -> list[Record]:
        """The first ``count`` records, when they are there."""
        records: list[Record] = []
        async with self.log.reader(topic, partition, start=0) as reader, asyncio.timeout(DEADLINE_S):
            while len(records) < count:
                records += await reader.poll(0.1)
        return records

    async def tasks(self, pool: int, count: int) -> list[TaskRecord]:
        return [decode(record.value or b"", TaskRecord) for record in await self.read("tasks", pool, count)]

    async def committed(self) -> dict[int, int]:
        found = {}
        for partition in range(PARTITIONS):
            found[partition] = await self.log.committed("requests", "tasktype", partition) or 0
        return found

    async def ends(self) -> dict[int, int]:
        return {number: (await self.log.offset_at("requests", number, 2**60)) for number in range(PARTITIONS)}

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, within_s=DEADLINE_S)

    async def until_committed(self) -> None:
        """Until all of ``requests`` is committed."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.committed() != await self.ends():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.log.ensure(
        [
            Topic("requests", PARTITIONS),
            Topic("tasks", POOLS, max_message_bytes=100_000),
            Topic("dead-letters", 1, max_message_bytes=50_000),
        ]
    )
    async with made.log:
        yield made
        for instance in made.instances:
            instance.task.cancel()
        await asyncio.gather(*(instance.task for instance in made.instances), return_exceptions=True)
