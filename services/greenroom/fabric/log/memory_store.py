"""What the in-memory log keeps: the records of each partition, and which of them may go."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from greenroom.fabric.log.base import Headers, LogFailed, Record, Topic
from greenroom.fabric.log.bell import Bell
from greenroom.fabric.log.placing import record_bytes

_OVERHEAD_BYTES = 600
"""What a small record takes in Python beyond its bytes."""
_COMPACT_AT = 1024
_TOMBSTONE_MS = 3_600_000
_offset_of = attrgetter("offset")
_time_of = attrgetter("timestamp_ms")


class Meter:
    """What all partitions of a broker take, roughly."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class StoredPartition:
    """Records by rising offset, with gaps where compaction took some; timestamps never fall.

    ``start``: the first offset that can be read; before it all is gone. ``end``: the next append's.
    """

    def __init__(self, topic: Topic, number: int, meter: Meter) -> None:
        self.topic = topic
        self.number = number
        self.start = 0
        self.end = 0
        self._meter = meter
        self.listeners: set[Bell] = set()
        self._records: list[Record] = []
        self._head = 0
        """Records before this index are gone, and are taken off the list when there are many of them."""
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
        for bell in self.listeners:
            bell.ring()
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
        """Everything before ``offset`` is gone."""
        if not 0 <= offset <= self.end:
            raise ValueError(f"{self.topic.name}/{self.number} ends at {self.end}: nothing to delete before {offset}")
        while self._head < len(self._records) and self._records[self._head].offset < offset:
            self._drop_oldest()
        self.start = max(self.start, offset)

    def expire(self, before_ms: int, before_offset: int) -> None:
        """What is older than ``before_ms``, and before ``before_offset``, is gone."""
        while (
            self._head < len(self._records)
            and self._records[self._head].timestamp_ms < before_ms
            and self._records[self._head].offset < before_offset
        ):
            self.start = self._records[self._head].offset + 1
            self._drop_oldest()

    def compact(self) -> None:
        """Only the last record of each key stays; a tombstone, for an hour."""
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
        """What each group has committed, by partition. A group that has a member is here even without."""
        self.turn = 0
        self.identity = str(uuid.uuid4())

    def floor(self, number: int) -> int:
        """Before this offset no group needs the partition's records any more."""
        partition = self.partitions[number]
        return min((held.get(number, partition.start) for held in self.committed.values()), default=partition.end)


def stored_bytes(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """What a record takes in memory, roughly."""
    return record_bytes(key, value, headers) + _OVERHEAD_BYTES


def _size(record: Record) -> int:
    return stored_bytes(record.key, record.value, record.headers)
