"""A member of a Kafka consumer group that survives slow users, rebalances and outages of brokers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka

from greenroom.core.units import MIB
from greenroom.fabric.log.base import Assignment, LogFailed, LogUnavailable, Record
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka import client as kafka_client
from greenroom.fabric.log.kafka.client import FATAL, RETRY_S, TROUBLE, as_log_error, record_of
from greenroom.fabric.log.wakeup import Wakeup

_LOG = logging.getLogger(__name__)
_POLL_MS = 100
_NOWHERE = 2**31 - 1
"""A partition that no topic has: a fetch from it shows errors and takes no record."""
_FULL_RECORDS = 1000
_FULL_BYTES = 8 * MIB


class _FetchBuffer:
    """The records of one partition that were fetched and not polled yet. Nothing is fetched into a full buffer."""

    __slots__ = ("bytes", "records")

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        self.bytes = 0

    @property
    def full(self) -> bool:
        return len(self.records) >= _FULL_RECORDS or self.bytes >= _FULL_BYTES

    def put(self, record: Record) -> None:
        self.records.append(record)
        self.bytes += len(record.value or b"")

    def take(self) -> Record:
        record = self.records.popleft()
        self.bytes -= len(record.value or b"")
        return record


class KafkaGroup:
    """See GroupConsumer. One aiokafka consumer at a time, and a task that polls it.

    Fetched records wait in a buffer for each partition: a paused partition keeps its records and hinders no other. The
    records of a revoked partition are dropped. Where aiokafka gives up, the task closes it, tells the user that all is
    revoked, and joins anew, for as long as this is open. Only a fatal error ends it.
    """

    def __init__(
        self,
        config: LogConfig,
        topic: str,
        group: str,
        assignment: Assignment,
        require: Callable[[str, float], Awaitable[Any]],
    ) -> None:
        self._config = config
        self._topic = topic
        self._full_topic = config.prefix + topic
        self._group = config.prefix + group
        self._told = assignment
        self._require = require
        self._consumer: AIOKafkaConsumer | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: LogFailed | None = None
        self._trouble: BaseException | None = None
        """Why the assigned partitions could not be taken on."""
        self._closed = False
        self._held: dict[int, int] = {}
        """By partition, where reading began."""
        self._committed: dict[int, int] = {}
        self._buffers: dict[int, _FetchBuffer] = {}
        self._giving = False
        self._paused: set[int] = set()
        self._turn = 0
        self._wakeup = Wakeup()
        self._room = asyncio.Event()
        self._joined = asyncio.Event()
        self._telling = asyncio.Lock()
        self._committing = asyncio.Lock()

    # -- its life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._require(self._full_topic, self._config.connect_timeout_s)
        self._task = asyncio.create_task(self._run(), name=f"group-{self._group}")
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._joined.wait()
        except TimeoutError:
            await self._close()
            waited = f"group {self._group}: not taken in within {self._config.connect_timeout_s:g} s"
            raise LogUnavailable(f"{waited} ({await kafka_client.why_unreachable(self._config)})") from None
        except BaseException:
            await self._close()
            raise
        if self._failure is not None:
            await self._close()
            raise self._failure
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        self._wakeup.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Join the group, again whenever the membership breaks."""
        while True:
            try:
                await self._be_member()
            except asyncio.CancelledError:
                raise
            except FATAL as error:
                self._fail(as_log_error(f"group {self._group} on {self._full_topic}", error), error)
                return
            except TROUBLE as error:
                _LOG.warning("group %s on %s: %r; joining again", self._group, self._full_topic, error)
            except Exception as error:
                _LOG.exception("group %s on %s failed", self._group, self._full_topic)
                self._fail(LogFailed(f"group {self._group} on {self._full_topic}: {error!r}"), error)
                return
            await asyncio.sleep(RETRY_S)

    async def _be_member(self) -> None:
        consumer = self._consumer = kafka_client.consumer(self._config, self._group)
        self._trouble = None
        try:
            consumer.subscribe([self._full_topic], listener=_Listener(self))
            await consumer.start()
            kafka_client.hear_commits(consumer)
            while True:
                await self._fetch(consumer)
        finally:
            await self._let_go()
            await kafka_client.close_consumer(consumer)

    async def _fetch(self, consumer: AIOKafkaConsumer) -> None:
        """One look for records, for partitions that have room for them."""
        if self._trouble is not None:
            raise self._trouble
        wanted = [
            TopicPartition(self._full_topic, number)
            for number, buffer in self._buffers.items()
            if number not in self._paused and not buffer.full
        ]
        if not wanted:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_MS / 1000):
                    await self._room.wait()
        try:
            batches = await consumer.getmany(
                *(wanted or [TopicPartition(self._full_topic, _NOWHERE)]),
                timeout_ms=_POLL_MS if wanted else 0,
                max_records=_FULL_RECORDS,
            )
        except kafka.NoOffsetForPartitionError:
            return  # a new partition: its first offset is being looked up
        for partition, messages in batches.items():
            buffer = self._buffers.get(partition.partition)
            if buffer is not None:
                for message in messages:
                    buffer.put(record_of(self._topic, message))
        if batches:
            self._wakeup.wake()
        elif kafka_client.stalled(consumer):
            raise kafka.KafkaError("the task that fetches has ended")

    def _fail(self, failure: BaseException, cause: BaseException) -> None:
        """The first one stays."""
        if self._failure is None:
            self._failure = failure if isinstance(failure, LogFailed) else LogFailed(str(failure))
            self._failure.__cause__ = cause
        self._joined.set()
        self._wakeup.wake()

    # -- told by aiokafka ----------------------------------------------------------------------------------------

    async def told_assigned(self, partitions: Sequence[int]) -> None:
        try:
            await self._take_on(partitions)
        except Exception as error:
            self._trouble = error
            self._room.set()

    async def told_revoked(self) -> None:
        await self._let_go()

    async def _take_on(self, partitions: Sequence[int]) -> None:
        consumer = self._consumer
        assert consumer is not None
        async with self._telling:
            self._committed, earliest = await self._beginnings(consumer, partitions)
            begin = dict(sorted((self._committed | earliest).items()))
            for number, offset in begin.items():
                consumer.seek(TopicPartition(self._full_topic, number), offset)
            self._held = begin
            if begin:
                await self._tell(self._told.assigned(dict(begin)), "assigned")
            self._buffers = {number: _FetchBuffer() for number in begin}
            self._giving = True
        self._room.set()
        self._joined.set()
        self._wakeup.wake()

    async def _beginnings(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[int]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """The committed offsets, and the earliest offsets of partitions without one."""
        committed: dict[int, int] = {}
        async with asyncio.timeout(self._config.request_timeout_s):
            new = []
            for number in partitions:
                partition = TopicPartition(self._full_topic, number)
                offset = await consumer.committed(partition)
                if offset is None:
                    new.append(partition)
                else:
                    committed[number] = offset
            earliest = await consumer.beginning_offsets(new) if new else {}
        return committed, {partition.partition: offset for partition, offset in earliest.items()}

    async def _let_go(self) -> None:
        self._giving = False
        async with self._telling:
            self._giving = False
            self._buffers = {}
            if self._held:
                await self._tell(self._told.revoked(sorted(self._held)), "revoked")
            self._held = {}

    async def _tell(self, told: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(self._config.session_timeout_s):
                await told
        except Exception as error:
            _LOG.exception("the user of group %s failed when told what is %s", self._group, what)
            reason = str(error) or type(error).__name__
            self._fail(LogFailed(f"group {self._group}: {what} failed: {reason}"), error)

    # -- for the user --------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> frozenset[int]:
        return frozenset(self._held)

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        await asyncio.sleep(0)
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise LogFailed(f"the consumer of {self._group} is closed")
            records = self._take(max_records) if self._giving else []
            left = until - loop.time()
            if records or left <= 0:
                return records
            await self._wakeup.wait(left)

    def _take(self, max_records: int) -> list[Record]:
        """From each partition in turn."""
        taken: list[Record] = []
        numbers = [n for n, buffer in self._buffers.items() if buffer.records and n not in self._paused]
        for step in range(len(numbers)):
            buffer = self._buffers[numbers[(self._turn + step) % len(numbers)]]
            while buffer.records and len(taken) < max_records:
                taken.append(buffer.take())
        self._turn += 1
        if taken:
            self._room.set()
        return taken

    async def commit(self, positions: Mapping[int, int]) -> bool:
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(self._config.request_timeout_s), self._committing:
                return await self._commit(positions)
        except FATAL as error:
            raise as_log_error(f"committing to {self._full_topic} for group {self._group}", error) from error
        except TROUBLE as error:
            _LOG.warning("group %s could not commit to %s: %r", self._group, self._full_topic, error)
            return False

    async def _commit(self, positions: Mapping[int, int]) -> bool:
        consumer = self._consumer
        if consumer is None or any(number not in self._held for number in positions):
            return False
        ahead = {number: offset for number, offset in positions.items() if offset > self._committed.get(number, -1)}
        if not ahead:
            return True
        if consumer._coordinator is None or consumer._coordinator.generation < 0:
            return False  # removed from the group: brokers take a commit without a generation from any client
        try:
            await consumer.commit({TopicPartition(self._full_topic, n): offset for n, offset in ahead.items()})
        except (kafka.CommitFailedError, kafka.IllegalStateError):
            return False
        if consumer is self._consumer:
            self._committed.update(ahead)
        return True

    def pause(self, partitions: Sequence[int]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[int]) -> None:
        self._paused.difference_update(partitions)
        self._room.set()
        self._wakeup.wake()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka logs what its listeners raise, and goes on. So these raise nothing."""

    def __init__(self, group: KafkaGroup) -> None:
        self._group = group

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self._group.told_assigned(sorted(partition.partition for partition in assigned))

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._group.told_revoked()
