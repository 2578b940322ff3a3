"""The records of the in-memory log, by partition, and which of them may be deleted."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from greenroom.fabric.log.base import Headers, LogFailed, Record, Topic
from greenroom.fabric.log.partitioner import record_bytes
from greenroom.fabric.log.wakeup import Wakeup

_OVERHEAD_BYTES = 600
"""What a small record takes in Python beyond its bytes."""
_COMPACT_AT = 1024
_TOMBSTONE_MS = 3_600_000
_offset_of = attrgetter("offset")
_time_of = attrgetter("timestamp_ms")


class Meter:
    """About how many bytes all partitions of a broker take."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class StoredPartition:
    """Records by rising offset, with gaps where compaction removed some. Timestamps never fall.

    ``start``: the first offset that can be read; all before it is deleted. ``end``: the offset of the next append.
    """

    def __init__(self, topic: Topic, number: int, meter: Meter) -> None:
        self.topic = topic
        self.number = number
        self.start = 0
        self.end = 0
        self._meter = meter
        self.listeners: set[Wakeup] = set()
        self._records: list[Record] = []
        self._head = 0
        """Records before this index are deleted, and are taken off the list when there are many of them."""
        self._last: dict[bytes, int] = {}
        self._superseded = 0

    def append(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, now_ms: int) -> Record:
        if self._records:
            now_ms = max(now_ms, self._records[-1].timestamp_ms)
        record = Record(topic, self.number, self.end, now_ms, key, value, tuple(headers))
        self._records.append(record)
        self.end += 1
        self._meter.bytes += stored_bytes(key, value, headers)
        if self.topic.compacted and key is not None:
            self._superseded += key in self._last
            self._last[key] = record.offset
            if self._superseded >= _COMPACT_AT:
                self.compact()
        for wakeup in self.listeners:
            wakeup.wake()
        return record

    def read(self, offset: int, limit: int) -> list[Record]:
        """At most ``limit`` records from ``offset`` on. Raises LogFailed outside ``start`` to ``end``."""
        if offset == self.end:
            return []
        if not self.start <= offset <= self.end:
            where = f"offset {offset} of {self.topic.name}/{self.number}"
            raise LogFailed(f"{where} is out of range: it holds {self.start} to {self.end}; nothing is skipped")
        at = self._index(offset)
        return self._records[at : at + limit]

    def offset_at(self, timestamp_ms: int) -> int:
        at = bisect_left(self._records, timestamp_ms, lo=self._head, key=_time_of)
        return self._records[at].offset if at < len(self._records) else self.end

    def delete_before(self, offset: int) -> None:
        """Delete everything before ``offset``."""
        if not 0 <= offset <= self.end:
            raise ValueError(f"{self.topic.name}/{self.number} ends at {self.end}: nothing to delete before {offset}")
        while self._head < len(self._records) and self._records[self._head].offset < offset:
            self._drop_oldest()
        self.start = max(self.start, offset)

    def expire(self, before_ms: int, before_offset: int) -> None:
        """Delete records that are older than ``before_ms`` and before ``before_offset``."""
        while (
            self._head < len(self._records)
            and self._records[self._head].timestamp_ms < before_ms
            and self._records[self._head].offset < before_offset
        ):
            self.start = self._records[self._head].offset + 1
            self._drop_oldest()

    def compact(self) -> None:
        """Keep only the last record of each key, and a tombstone only for an hour."""
        kept: list[Record] = []
        before = sum(map(_size, self._live()))
        now_ms = self._records[-1].timestamp_ms if self._records else 0
        for record in self._live():
            if record.key is not None and self._last.get(record.key) != record.offset:
                continue
            if record.value is None and record.key is not None and record.timestamp_ms < now_ms - _TOMBSTONE_MS:
                del self._last[record.key]
                continue
            kept.append(record)
        self._records, self._head, self._superseded = kept, 0, 0
        self._meter.bytes += sum(map(_size, kept)) - before

    def _live(self) -> Iterator[Record]:
        for index in range(self._head, len(self._records)):
            yield self._records[index]

    def _index(self, offset: int) -> int:
        if not self.topic.compacted and self._records:  # without gaps
            return offset - self._records[0].offset
        return bisect_left(self._records, offset, lo=self._head, key=_offset_of)

    def _drop_oldest(self) -> None:
        self._meter.bytes -= _size(self._records[self._head])
        self._head += 1
        if self._head >= _COMPACT_AT and 2 * self._head >= len(self._records):
            del self._records[: self._head]
            self._head = 0


class StoredTopic:
    """A topic's partitions."""

    def __init__(self, topic: Topic, meter: Meter) -> None:
        self.topic = topic
        self.partitions = [StoredPartition(topic, number, meter) for number in range(topic.partitions)]
        self.committed: dict[str, dict[int, int]] = {}
        """What each group has committed, by partition. A group without commits is here once it has a member."""
        self.turn = 0
        self.identity = str(uuid.uuid4())

    def floor(self, number: int) -> int:
        """Every group has committed past the partition's records before this offset."""
        partition = self.partitions[number]
        return min((held.get(number, partition.start) for held in self.committed.values()), default=partition.end)


def stored_bytes(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """What a record takes in memory, roughly."""
    return record_bytes(key, value, headers) + _OVERHEAD_BYTES


def _size(record: Record) -> int:
    return stored_bytes(record.key, record.value, record.headers)
