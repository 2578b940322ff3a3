"""Reads one partition of a Kafka topic, across outages of the brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka

from greenroom.fabric.log.base import LogError, LogFailed, Record
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka import client as kafka_client
from greenroom.fabric.log.kafka.client import RETRY_S, TROUBLE, as_log_error, record_of

_LOG = logging.getLogger(__name__)


class KafkaReader:
    """See Reader. Where aiokafka gives up, reading begins anew at the position that was reached."""

    def __init__(
        self,
        config: LogConfig,
        topic: str,
        partition: int,
        start: int | None,
        require: Callable[[str, float], Awaitable[Any]],
    ) -> None:
        self._config = config
        self._topic = topic
        self._partition = TopicPartition(config.prefix + topic, partition)
        self._position = -1 if start is None else start
        self._require = require
        self._consumer: AIOKafkaConsumer | None = None
        self._failure: LogError | None = None
        self._beginning = asyncio.Lock()

    @property
    def _name(self) -> str:
        return f"{self._partition.topic}/{self._partition.partition}"

    async def __aenter__(self) -> Self:
        known = await self._require(self._partition.topic, self._config.connect_timeout_s)
        if not 0 <= self._partition.partition < known.partitions:
            raise LogFailed(f"{self._partition.topic} has {known.partitions} partitions, not {self._name}")
        try:
            await self._begin(self._config.connect_timeout_s)
        except TROUBLE as error:
            raise as_log_error(f"reading {self._name}", error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._failure = self._failure or LogFailed(f"the reader of {self._name} is closed")
        await self._end()

    async def _begin(self, timeout_s: float) -> AIOKafkaConsumer:
        """The consumer, made where there is none."""
        async with self._beginning:
            if self._consumer is not None:
                return self._consumer
            consumer = kafka_client.consumer(self._config)
            try:
                async with asyncio.timeout(timeout_s):
                    await consumer.start()
                    if self._position < 0:
                        earliest = await consumer.beginning_offsets([self._partition])
                        self._position = earliest[self._partition]
                consumer.assign([self._partition])
                consumer.seek(self._partition, self._position)
            except BaseException:
                await kafka_client.close_consumer(consumer)
                raise
            self._consumer = consumer
            return consumer

    async def _end(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await kafka_client.close_consumer(consumer)

    @property
    def position(self) -> int:
        return self._position

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        await asyncio.sleep(0)
        while True:
            if self._failure is not None:
                raise self._failure
            left = max(0.0, until - loop.time())
            try:
                records = await self._fetch(left, max_records)
            except TROUBLE as error:
                failure = as_log_error(f"reading {self._name}", error)
                if isinstance(failure, LogFailed):
                    self._failure = failure
                    raise failure from error
                _LOG.warning("reading %s: %r; beginning anew at %d", self._name, error, self._position)
                await self._end()
                await asyncio.sleep(min(RETRY_S, left))
                records = []
            if records or loop.time() >= until:
                return records

    async def _fetch(self, timeout_s: float, max_records: int) -> list[Record]:
        consumer = await self._begin(min(max(timeout_s, RETRY_S), self._config.request_timeout_s))
        batches = await consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        records = [record_of(self._topic, message) for message in batches.get(self._partition, ())]
        self._position = await consumer.position(self._partition)  # without a wait: it was sought at the beginning
        if not records and kafka_client.stalled(consumer):
            raise kafka.KafkaError("the task that fetches has ended")
        return records

    async def end(self) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                consumer = await self._begin(self._config.request_timeout_s)
                ends = await consumer.end_offsets([self._partition])
                return int(ends[self._partition])
        except TROUBLE as error:
            raise as_log_error(f"the end of {self._name}", error) from error
