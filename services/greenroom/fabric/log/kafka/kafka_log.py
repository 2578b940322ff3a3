"""The log on Apache Kafka, by aiokafka."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka

from greenroom.core.units import MIB
from greenroom.fabric.log.base import (
    AppendNotSent,
    AppendRefused,
    AppendUnknown,
    Assignment,
    Headers,
    LogError,
    LogFailed,
    LogUnavailable,
    Position,
    Topic,
)
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka import client as kafka_client
from greenroom.fabric.log.kafka import topics as kafka_topics
from greenroom.fabric.log.kafka.client import FENCED, FORBIDDEN, RETRY_S, TROUBLE, as_log_error
from greenroom.fabric.log.kafka.group import KafkaGroup
from greenroom.fabric.log.kafka.reader import KafkaReader
from greenroom.fabric.log.kafka.topics import Known
from greenroom.fabric.log.partitioner import partition_of, record_bytes

_LOG = logging.getLogger(__name__)
_LARGEST_REQUEST = 64 * MIB
_REFUSED = (
    kafka.MessageSizeTooLargeError,
    kafka.RecordListTooLargeError,
    kafka.InvalidTopicError,
    kafka.InvalidTimestampError,
    kafka.UnsupportedForMessageFormatError,
    kafka.PolicyViolationError,
)
"""Answers to an append by which the record is certainly not there."""
T = TypeVar("T")


class KafkaLog:
    """See Log. One producer, one consumer for questions; groups and readers have connections of their own.

    The producer is idempotent and tries again by itself without end, so an append that has timed out may still land
    when the brokers are back. After an answer other than an acknowledgement its sequence numbers no longer agree with
    the broker's. So it is replaced, and its other appends under way are unknown.
    """

    def __init__(self, config: LogConfig) -> None:
        self.config = config
        self._known: dict[str, Known] = {}
        self._producer: AIOKafkaProducer | None = None
        self._questions: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._open = False

    async def __aenter__(self) -> Self:
        kafka_client.throttle_logs()
        self._open = True
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _connect(self) -> None:
        """Wait until the brokers answer, for a bounded time: they may start later than we do."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.connect_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await self._ask()
                    await self._sender()
                return
            except (*FORBIDDEN, kafka.UnsupportedVersionError) as error:
                raise as_log_error("connecting", error) from error
            except TROUBLE as error:
                if loop.time() + RETRY_S >= until:
                    reason = await kafka_client.why_unreachable(self.config)
                    waited = f"no Kafka within {self.config.connect_timeout_s:g} s ({reason})"
                    raise LogUnavailable(
                        f"{waited}: check that the brokers run, and TLS, user and password as they ask for"
                    ) from error
                _LOG.warning("Kafka does not answer yet: %r", error)
            await asyncio.sleep(RETRY_S)

    async def _close(self) -> None:
        self._open = False
        producer, self._producer = self._producer, None
        if producer is not None:
            self._retire(producer, kafka_client.CLOSE_S)
        questions, self._questions = self._questions, None
        if questions is not None:
            await kafka_client.close_consumer(questions)
        if self._closing:
            await asyncio.wait(self._closing)

    # -- appending -----------------------------------------------------------------------------------------------

    async def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout_s: float = 10.0,
    ) -> Position:
        if value is None and key is None:
            raise ValueError("a record without a value needs a key")
        until = asyncio.get_running_loop().time() + timeout_s
        try:
            known = self._known.get(self.config.prefix + topic)
            if known is None:
                known = await self._require(self.config.prefix + topic, timeout_s)
        except LogUnavailable as error:
            raise AppendNotSent(str(error)) from error
        partition = self._placed(known, key, partition)
        size = record_bytes(key, value, headers)
        if size > known.max_message_bytes:
            raise AppendRefused(f"a record of {size} bytes is too large: {known.name} takes {known.max_message_bytes}")
        if key is None and known.compacted:
            raise AppendRefused(f"{known.name} is compacted: its records need a key")
        producer: AIOKafkaProducer | None = None
        try:
            async with asyncio.timeout_at(until):
                producer = self._producer or await self._sender()
                sent = await producer.send(known.name, value, key, partition=partition, headers=list(headers))
        except TROUBLE as error:  # before it was taken into a batch, so it is certainly not there
            if producer is not None and not isinstance(error, (TimeoutError, kafka.KafkaTimeoutError)):
                self._replace(producer)
            if isinstance(error, FORBIDDEN):
                raise as_log_error(f"appending to {known.name}", error) from error
            if isinstance(error, _REFUSED):
                raise _refusal(known.name, error) from error
            raise AppendNotSent(f"not sent to {known.name}: {str(error) or 'no broker took it in time'}") from error
        try:
            async with asyncio.timeout_at(until):
                landed = await sent
        except TimeoutError as error:
            waited = f"no acknowledgement from {known.name} within {timeout_s:g} s"
            raise AppendUnknown(f"{waited}: the record may be there, or yet land there") from error
        except kafka.KafkaError as error:
            self._replace(producer)
            raise _refusal(known.name, error) from error
        if landed.offset < 0:
            raise AppendUnknown(f"the record is in {known.name}, but the broker no longer says where")
        return Position(landed.partition, landed.offset, landed.timestamp)

    def _placed(self, known: Known, key: bytes | None, partition: int | None) -> int:
        if partition is not None:
            if not 0 <= partition < known.partitions:
                raise AppendRefused(f"{known.name} has {known.partitions} partitions, not one of number {partition}")
            return partition
        if key is not None:
            return partition_of(key, known.partitions)
        self._turn += 1
        return self._turn % known.partitions

    async def _sender(self) -> AIOKafkaProducer:
        async with self._opening:
            if self._producer is not None:
                return self._producer
            if not self._open:
                raise kafka.ProducerClosed("the log is closed")
            producer = AIOKafkaProducer(
                **kafka_client.client_options(self.config),
                acks="all",
                enable_idempotence=True,
                max_batch_size=128 * 1024,
                max_request_size=_LARGEST_REQUEST,
                linger_ms=0,
            )
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            self._producer = producer
            return producer

    def _replace(self, producer: AIOKafkaProducer) -> None:
        """The next append makes another."""
        if self._producer is producer:
            self._producer = None
            self._retire(producer, 0.0)

    def _retire(self, producer: AIOKafkaProducer, flush_s: float) -> None:
        task = asyncio.create_task(_stop(producer, flush_s), name="close-producer")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- topics and questions ------------------------------------------------------------------------------------

    async def ensure(self, topics: Sequence[Topic]) -> None:
        named = [dataclasses.replace(topic, name=self.config.prefix + topic.name) for topic in topics]
        for known in await kafka_topics.ensure(self.config, named, self.config.connect_timeout_s):
            self._known[known.name] = known

    async def _require(self, name: str, timeout_s: float) -> Known:
        """The topic as the brokers have it. Raises LogFailed where it does not exist, LogUnavailable."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = await kafka_topics.describe(self.config, name, timeout_s)
        return known

    def group(self, topic: str, group: str, assignment: Assignment) -> KafkaGroup:
        return KafkaGroup(self.config, topic, group, assignment, self._require)

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> KafkaReader:
        return KafkaReader(self.config, topic, partition, start, self._require)

    async def partitions(self, topic: str) -> int:
        name = self.config.prefix + topic
        known = self._known[name] = await kafka_topics.describe(self.config, name, self.config.request_timeout_s)
        return known.partitions

    async def identity(self, topic: str) -> str:
        return await kafka_topics.identity(self.config, self.config.prefix + topic, self.config.request_timeout_s)

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        where = TopicPartition(self.config.prefix + topic, partition)

        async def ask(consumer: AIOKafkaConsumer) -> int:
            # The end first: a record appended between the two questions must not be missed.
            end = (await consumer.end_offsets([where]))[where]
            found = (await consumer.offsets_for_times({where: timestamp_ms}))[where]
            return int(end if found is None else found.offset)

        return await self._answer(where.topic, ask)

    async def committed(self, topic: str, group: str, partition: int) -> int | None:
        where = TopicPartition(self.config.prefix + topic, partition)
        await self._require(where.topic, self.config.request_timeout_s)
        group = self.config.prefix + group
        return await kafka_topics.committed(self.config, group, where, self.config.request_timeout_s)

    async def _answer(self, topic: str, ask: Callable[[AIOKafkaConsumer], Awaitable[T]]) -> T:
        await self._require(topic, self.config.request_timeout_s)
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await ask(await self._ask())
        except TROUBLE as error:
            raise as_log_error(f"asking about {topic}", error) from error

    async def _ask(self) -> AIOKafkaConsumer:
        async with self._opening:
            if self._questions is None:
                if not self._open:
                    raise LogFailed("the log is closed")
                consumer = kafka_client.consumer(self.config)
                try:
                    await consumer.start()
                except BaseException:
                    await kafka_client.close_consumer(consumer)
                    raise
                self._questions = consumer
            return self._questions


def _refusal(name: str, error: kafka.KafkaError) -> LogError:
    if isinstance(error, FORBIDDEN):
        return as_log_error(f"appending to {name}", error)
    if isinstance(error, FENCED):
        return LogFailed(f"appending to {name}: fenced by another producer ({error})")
    if isinstance(error, _REFUSED):
        return AppendRefused(f"{name} refused the record: {error}")
    return AppendUnknown(f"{name} did not acknowledge the record: {error}; it may be there")


async def _stop(producer: AIOKafkaProducer, flush_s: float) -> None:
    """Wait up to ``flush_s`` for appends under way, then give the others up and close.

    An idempotent producer tries for ever, and its own ``stop`` waits for that. So it is taken apart by hand where some
    appends have not landed.
    """
    batches = producer._message_accumulator
    if flush_s > 0 and await kafka_client.finish(asyncio.create_task(producer.flush()), flush_s):
        await kafka_client.finish(asyncio.create_task(producer.stop()), kafka_client.CLOSE_S)
        return
    batches._closed = producer._closed = True
    for _ in range(2):  # once for its loop, once for what that waits for at its end
        await kafka_client.finish(producer._sender.sender_task, cancelling_s=0.2)
    given_up = 0
    for batch in [*batches._pending_batches, *itertools.chain.from_iterable(batches._batches.values())]:
        for future, _metadata in batch._msg_futures:
            if not future.done():
                future.set_exception(kafka.ProducerClosed("the producer was closed"))
                given_up += 1
    if given_up:
        _LOG.warning("%d appends that were not acknowledged are given up: their records may be there", given_up)
    await kafka_client.finish(asyncio.create_task(producer.client.close()), kafka_client.CLOSE_S)
