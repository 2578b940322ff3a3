"""The logs that the contract is run on, behind what its tests need beside the interface."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from greenroom.fabric.log import GroupConsumer, Log, LogConfig, MemoryBroker, MemoryLog, Reader, Record, Topic
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from tests.kafka.broker import Broker
from tests.waiting import until

WAIT_S = 20.0


class Kind(Protocol):
    """A cluster, and a prefix on it that no other test has."""

    prefix: str
    session_s: float
    """After so long a silent member is taken for dead."""

    def connect(self) -> Log:
        """One more connection, as another process would have."""
        ...

    async def delete_records(self, topic: str, partition: int, before: int) -> None: ...

    async def delete_topics(self) -> None:
        """All of the prefix. Connections from now on find none of them."""
        ...


@dataclass
class Memory:
    prefix: str = "memory."
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    session_s: float = 0.2  # it has none

    def connect(self) -> Log:
        return MemoryLog(self.broker, prefix=self.prefix)

    async def delete_records(self, topic: str, partition: int, before: int) -> None:
        self.broker.delete_records(self.prefix + topic, partition, before)

    async def delete_topics(self) -> None:
        self.broker = MemoryBroker()


@dataclass
class Kafka:
    broker: Broker
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:12]}.")
    session_s: float = 3.0
    request_timeout_s: float = 10.0

    def config(self) -> LogConfig:
        return LogConfig(
            brokers=(self.broker.address,),
            prefix=self.prefix,
            session_timeout_s=self.session_s,
            heartbeat_s=0.2,
            connect_timeout_s=30.0,
            request_timeout_s=self.request_timeout_s,
        )

    def connect(self) -> Log:
        return KafkaLog(self.config())

    async def delete_records(self, topic: str, partition: int, before: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.address)
        try:
            await admin.start()
            await admin.delete_records({TopicPartition(self.prefix + topic, partition): RecordsToDelete(before)})
        finally:
            await admin.close()

    async def delete_topics(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.address)
        try:
            await admin.start()
            async with asyncio.timeout(WAIT_S):
                while there := [name for name in await admin.list_topics() if name.startswith(self.prefix)]:
                    await admin.delete_topics(there)
        finally:
            await admin.close()

    async def set_config(self, topic: str, name: str, value: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.address)
        try:
            await admin.start()
            resource = ConfigResource(ConfigResourceType.TOPIC, self.prefix + topic, {name: value})
            await admin.alter_configs([resource])
        finally:
            await admin.close()


@dataclass
class Told:
    """An Assignment that remembers what it was told."""

    held: dict[int, int] = field(default_factory=dict)
    history: list[tuple[str, dict[int, int] | list[int]]] = field(default_factory=list)

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        self.held = dict(partitions)
        self.history.append(("assigned", dict(partitions)))

    async def revoked(self, partitions: Sequence[int]) -> None:
        assert sorted(self.held) == list(partitions)
        self.held = {}
        self.history.append(("revoked", list(partitions)))


async def read(source: GroupConsumer | Reader, count: int, *, max_records: int = 500) -> list[Record]:
    """Poll until ``count`` records have come."""
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            found += await source.poll(1.0, max_records)
    assert len(found) == count
    return found


async def until_held(consumer: GroupConsumer, count: int) -> None:
    """Wait until the consumer holds so many partitions."""
    await until(lambda: len(consumer.assignment) == count)


@contextlib.asynccontextmanager
async def topic_on(
    kind: Kind, partitions: int = 1, *, compacted: bool = False, max_message_bytes: int = 1024 * 1024
) -> AsyncIterator[Log]:
    """A connection with the topic ``things`` on it."""
    async with kind.connect() as log:
        await log.ensure([Topic("things", partitions, compacted=compacted, max_message_bytes=max_message_bytes)])
        yield log
