"""Topics of a Kafka cluster: look them up, create absent ones, check that existing ones fit the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from greenroom.fabric.log.base import LogFailed, LogUnavailable, Topic
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka import client as kafka_client
from greenroom.fabric.log.kafka.client import RETRY_S, TROUBLE, as_log_error
from greenroom.fabric.log.kafka.topic_ids import topic_id

_SETTINGS = ("cleanup.policy", "max.message.bytes", "message.timestamp.type")
_EXISTS = 36
_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Known:
    """A topic as the brokers have it. ``name``: with its prefix."""

    name: str
    partitions: int
    compacted: bool
    max_message_bytes: int
    stamped_by_broker: bool


@asynccontextmanager
async def _admin(config: LogConfig) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**kafka_client.client_options(config))
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


async def ensure(config: LogConfig, topics: Sequence[Topic], timeout_s: float) -> list[Known]:
    """Create those of ``topics`` (named with their prefix) that are absent. Returns all as the brokers have them.

    Raises LogFailed where a topic can not be created or breaks the protocol, LogUnavailable.
    """
    names = [topic.name for topic in topics]
    try:
        async with asyncio.timeout(timeout_s), _admin(config) as admin:
            there = await _partitions(admin)
            absent = [topic for topic in topics if topic.name not in there]
            if absent:
                await _create(admin, absent, await _replicas(admin, config))
            known = await _described(admin, names)
    except TROUBLE as error:
        raise as_log_error(f"creating the topics {', '.join(names)}", error) from error
    wrong = [problem for topic in topics for problem in contradictions(topic, known[topic.name])]
    if wrong:
        raise LogFailed(f"{'; '.join(wrong)}: change it there, or use another prefix")
    return [known[name] for name in names]


async def describe(config: LogConfig, name: str, timeout_s: float) -> Known:
    """The topic ``name`` (with its prefix). Raises LogFailed where it does not exist, LogUnavailable."""
    try:
        async with asyncio.timeout(timeout_s), _admin(config) as admin:
            if name not in await _partitions(admin):
                raise LogFailed(f"there is no topic {name!r}: create it with ensure() first")
            return (await _described(admin, [name]))[name]
    except TROUBLE as error:
        raise as_log_error(f"looking up the topic {name}", error) from error


async def identity(config: LogConfig, name: str, timeout_s: float) -> str:
    """The id of the topic ``name`` (with its prefix). Raises LogFailed where it does not exist, LogUnavailable."""
    try:
        async with asyncio.timeout(timeout_s), _admin(config) as admin:
            return await topic_id(admin, name)
    except kafka.UnknownTopicOrPartitionError as error:
        raise LogFailed(f"there is no topic {name!r}: create it with ensure() first") from error
    except TROUBLE as error:
        raise as_log_error(f"looking up the topic {name}", error) from error


async def committed(config: LogConfig, group: str, where: TopicPartition, timeout_s: float) -> int | None:
    """The next offset that ``group`` (with its prefix) would read; None where it has committed none."""
    try:
        async with asyncio.timeout(timeout_s), _admin(config) as admin:
            while True:
                try:
                    found = await admin.list_consumer_group_offsets(group, partitions=[where])
                except kafka.KafkaError as error:
                    if not error.retriable:
                        raise
                    await asyncio.sleep(RETRY_S)
                    continue
                offset = found[where].offset if where in found else -1
                return offset if offset >= 0 else None
    except TROUBLE as error:
        raise as_log_error(f"what the group {group} has committed", error) from error


def contradictions(asked: Topic, there: Known) -> list[str]:
    """In which ways an existing topic breaks the protocol."""
    wrong = []
    if there.partitions < asked.partitions:
        wrong.append(f"the topic {asked.name} has {there.partitions} partitions, fewer than {asked.partitions}")
    if not there.stamped_by_broker:
        wrong.append(f"the topic {asked.name} has message.timestamp.type=CreateTime; it must be LogAppendTime")
    if there.compacted and not asked.compacted:
        wrong.append(f"the topic {asked.name} is compacted; its cleanup.policy must be delete")
    if asked.compacted and not there.compacted:
        wrong.append(f"the topic {asked.name} is not compacted; its cleanup.policy must be compact")
    if there.max_message_bytes < asked.max_message_bytes:
        size = f"max.message.bytes={there.max_message_bytes}, less than {asked.max_message_bytes}"
        wrong.append(f"the topic {asked.name} has {size}")
    return wrong


def settings(topic: Topic, replicas: int) -> dict[str, str]:
    """The settings of a new topic. With more than one replica, an append is acknowledged only while two have it. So the
    loss of one replica stops appends where there are two, and does not where there are three."""
    chosen = {
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(topic.max_message_bytes),
        "cleanup.policy": "compact" if topic.compacted else "delete",
    }
    if topic.retention_ms is not None and not topic.compacted:
        chosen["retention.ms"] = str(topic.retention_ms)
    if replicas > 1:
        chosen["min.insync.replicas"] = str(max(2, replicas - 1))
    return chosen


async def _partitions(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Partitions by topic, of all topics. A question for one name would create that topic on some brokers."""
    return {
        topic["topic"]: len(topic["partitions"])
        for topic in await admin.describe_topics(None)
        if not topic["error_code"] and topic["partitions"]
    }


async def _replicas(admin: AIOKafkaAdminClient, config: LogConfig) -> int:
    brokers = len((await admin.describe_cluster())["brokers"])
    if config.replication is not None and config.replication > brokers:
        raise LogFailed(f"replication: {config.replication} replicas are asked for, and there are {brokers} brokers")
    return config.replication or min(3, brokers)


async def _create(admin: AIOKafkaAdminClient, topics: Sequence[Topic], replicas: int) -> None:
    response = await admin.create_topics(
        [NewTopic(topic.name, topic.partitions, replicas, topic_configs=settings(topic, replicas)) for topic in topics]
    )
    for name, code, *message in response.topic_errors:
        if code not in (0, _EXISTS):  # another service may have been quicker
            error = kafka.for_code(code)
            if error.retriable:
                raise error(name)
            reason = f"{error.message} {message[0] if message and message[0] else ''}".strip()
            raise LogFailed(f"the topic {name} can not be created: {reason}")


async def _described(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, Known]:
    """Brokers learn of a new topic a moment after it was created."""
    while True:
        partitions = await _partitions(admin)
        if all(name in partitions for name in names):
            found = await _settings(admin, names)
            if found is not None:
                return {name: _known(name, partitions[name], found[name]) for name in names}
        await asyncio.sleep(RETRY_S / 4)


async def _settings(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, Mapping[str, str]] | None:
    wanted = dict.fromkeys(_SETTINGS)
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, wanted) for name in names]
    found: dict[str, Mapping[str, str]] = {}
    for response in await admin.describe_configs(resources):
        for code, message, _kind, name, entries in response.resources:
            if code == _UNKNOWN:
                return None
            if code:
                raise kafka.for_code(code)(message or name)
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


def _known(name: str, partitions: int, found: Mapping[str, Any]) -> Known:
    missing = [setting for setting in _SETTINGS if setting not in found]
    if missing:
        raise LogUnavailable(f"the brokers do not say {', '.join(missing)} of the topic {name}")
    return Known(
        name,
        partitions,
        compacted="compact" in found["cleanup.policy"],
        max_message_bytes=int(found["max.message.bytes"]),
        stamped_by_broker=found["message.timestamp.type"] == "LogAppendTime",
    )
