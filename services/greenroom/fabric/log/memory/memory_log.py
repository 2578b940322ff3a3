"""The log in memory: the twin of Kafka in tests, and what all services share when they run in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from greenroom.core.units import MIB, format_bytes
from greenroom.fabric.log.base import (
    AppendNotSent,
    AppendRefused,
    Assignment,
    Headers,
    LogFailed,
    Position,
    Record,
    Topic,
)
from greenroom.fabric.log.memory.groups import MemoryConsumer, MemoryGroup
from greenroom.fabric.log.memory.store import Meter, StoredPartition, StoredTopic, stored_bytes
from greenroom.fabric.log.partitioner import partition_of, record_bytes
from greenroom.fabric.log.wakeup import Wakeup

_RETENTION_MS = 7 * 24 * 3_600_000
_LOOK_EVERY = 64
"""Appends to a partition between two looks for records that are too old."""


class MemoryBroker:
    """What each ``MemoryLog`` connects to: topics, groups, and a bound on their size.

    A record is deleted when it is older than its topic's retention and every group of the topic has committed past it.
    ``max_bytes`` bounds all records: near the bound, they are deleted as soon as every group has committed past them,
    and an append that finds no room fails. A group that is no longer served holds its records for ever. ``clock``:
    Unix seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 * MIB,
        callback_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_bytes = max_bytes
        self._callback_timeout_s = callback_timeout_s
        self._clock = clock
        self._topics: dict[str, StoredTopic] = {}
        self._groups: dict[tuple[str, str], MemoryGroup] = {}
        self._users = 0
        self._meter = Meter()

    @property
    def used_bytes(self) -> int:
        """About how many bytes the records take; at most ``max_bytes``."""
        return self._meter.bytes

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete everything before the offset, also records that a group still needs. ``topic`` with its prefix."""
        self.topic(topic).partitions[partition].delete_before(before)

    def compact(self, topic: str) -> None:
        """Remove superseded records now. ``topic`` with its prefix."""
        for partition in self.topic(topic).partitions:
            partition.compact()

    # -- for MemoryLog -------------------------------------------------------------------------------------------

    def topic(self, name: str) -> StoredTopic:
        stored = self._topics.get(name)
        if stored is None:
            raise LogFailed(f"there is no topic {name!r}: create it with ensure() first")
        return stored

    def create(self, topic: Topic) -> None:
        there = self._topics.setdefault(topic.name, StoredTopic(topic, self._meter)).topic
        for wrong, why in (
            (there.partitions < topic.partitions, f"{there.partitions} partitions instead of {topic.partitions}"),
            (there.compacted != topic.compacted, "compaction" if there.compacted else "no compaction"),
            (
                there.max_message_bytes < topic.max_message_bytes,
                f"a largest message of {there.max_message_bytes} bytes instead of {topic.max_message_bytes}",
            ),
        ):
            if wrong:
                raise LogFailed(f"the topic {topic.name} is there with {why}: change it, or use another prefix")

    def group(self, topic: str, name: str) -> MemoryGroup:
        group = self._groups.get((topic, name))
        if group is None:
            group = self._groups[topic, name] = MemoryGroup(name, self.topic(topic), self._callback_timeout_s)
        return group

    def append(
        self, topic: str, name: str, value: bytes | None, key: bytes | None, partition: int | None, headers: Headers
    ) -> Record:
        stored = self.topic(topic)
        if partition is None:
            if key is None:
                stored.turn += 1
                partition = stored.turn % len(stored.partitions)
            else:
                partition = partition_of(key, len(stored.partitions))
        elif not 0 <= partition < len(stored.partitions):
            raise AppendRefused(f"{topic} has {len(stored.partitions)} partitions, not one of number {partition}")
        size = record_bytes(key, value, headers)
        if size > stored.topic.max_message_bytes:
            raise AppendRefused(
                f"a record of {size} bytes is too large: {topic} takes {stored.topic.max_message_bytes}"
            )
        if key is None and stored.topic.compacted:
            raise AppendRefused(f"{topic} is compacted: its records need a key")
        target = stored.partitions[partition]
        if target.end % _LOOK_EVERY == 0:
            self._expire(stored.topic, target, stored.floor(partition))
        if self.used_bytes + stored_bytes(key, value, headers) > self.max_bytes:
            self._make_room(stored_bytes(key, value, headers))
        return target.append(name, key, value, headers, int(self._clock() * 1000))

    def _expire(self, topic: Topic, partition: StoredPartition, floor: int) -> None:
        if not topic.compacted:
            retention_ms = _RETENTION_MS if topic.retention_ms is None else topic.retention_ms
            partition.expire(int(self._clock() * 1000) - retention_ms, floor)

    def _make_room(self, wanted: int) -> None:
        for share in (2, 1):  # half of what no group needs, then all
            self._shrink(share)
            if self.used_bytes + wanted <= self.max_bytes:
                return
        raise AppendNotSent(
            f"the log in memory is full ({format_bytes(self.max_bytes)}): its consumers do not keep up, or a group "
            "that is no longer served holds its records"
        )

    def _shrink(self, share: int) -> None:
        for stored in self._topics.values():
            for partition in stored.partitions:
                if stored.topic.compacted:
                    partition.compact()
                else:
                    dead = max(0, stored.floor(partition.number) - partition.start)
                    partition.delete_before(partition.start + -(-dead // share))

    def enter(self) -> None:
        self._users += 1

    async def leave(self) -> None:
        """The last user waits for rebalances that are under way."""
        self._users -= 1
        if self._users == 0:
            await asyncio.gather(*(group.close() for group in self._groups.values()))


class MemoryReader:
    """See Reader."""

    def __init__(self, log: MemoryBroker, topic: str, partition: int, start: int | None) -> None:
        self._broker = log
        self._topic = topic
        self._number = partition
        self._start = start
        self._position = 0
        self._wakeup = Wakeup()
        self._stored: StoredPartition | None = None

    async def __aenter__(self) -> Self:
        partitions = self._broker.topic(self._topic).partitions
        if not 0 <= self._number < len(partitions):
            raise LogFailed(f"{self._topic} has {len(partitions)} partitions, not one of number {self._number}")
        self._stored = partitions[self._number]
        self._position = self._stored.start if self._start is None else self._start
        self._stored.listeners.add(self._wakeup)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.listeners.discard(self._wakeup)
        self._stored = None
        self._wakeup.wake()

    @property
    def _open(self) -> StoredPartition:
        if self._stored is None:
            raise LogFailed(f"the reader of {self._topic} is closed")
        return self._stored

    @property
    def position(self) -> int:
        return self._position

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        await asyncio.sleep(0)
        while True:
            records = self._open.read(self._position, max_records)
            if records:
                self._position = records[-1].offset + 1
                return records
            self._position = self._open.end  # compaction may have left nothing between
            left = until - loop.time()
            if left <= 0:
                return []
            await self._wakeup.wait(left)

    async def end(self) -> int:
        return self._open.end


class MemoryLog:
    """One service's connection to a MemoryBroker; one of its own where none is given. See Log."""

    def __init__(self, broker: MemoryBroker | None = None, *, prefix: str = "") -> None:
        self.broker = broker or MemoryBroker()
        self._prefix = prefix

    async def __aenter__(self) -> Self:
        self.broker.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.broker.leave()

    async def ensure(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            self.broker.create(
                Topic(
                    self._prefix + topic.name,
                    topic.partitions,
                    topic.retention_ms,
                    topic.compacted,
                    topic.max_message_bytes,
                )
            )

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
        record = self.broker.append(self._prefix + topic, topic, value, key, partition, headers)
        return Position(record.partition, record.offset, record.timestamp_ms)

    def group(self, topic: str, group: str, assignment: Assignment) -> MemoryConsumer:
        return MemoryConsumer(lambda: self.broker.group(self._prefix + topic, self._prefix + group), assignment)

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> MemoryReader:
        return MemoryReader(self.broker, self._prefix + topic, partition, start)

    async def partitions(self, topic: str) -> int:
        return len(self.broker.topic(self._prefix + topic).partitions)

    async def identity(self, topic: str) -> str:
        return self.broker.topic(self._prefix + topic).identity

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.broker.topic(self._prefix + topic).partitions[partition].offset_at(timestamp_ms)

    async def committed(self, topic: str, group: str, partition: int) -> int | None:
        return self.broker.topic(self._prefix + topic).committed.get(self._prefix + group, {}).get(partition)
