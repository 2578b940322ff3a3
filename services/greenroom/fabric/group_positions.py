"""The positions of a consumer group's member: what of each of its partitions is finished and committed, and its lag."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping

from greenroom.fabric.committable_offsets import PrefixTracker
from greenroom.fabric.log import GroupConsumer, Log, LogError, LogFailed, Record

_LOG = logging.getLogger(__name__)
_DAY_MS = 24 * 3_600_000


class GroupPositions:
    """A tracker for each partition of one topic, from its assignment to its revocation."""

    def __init__(self, topic: str) -> None:
        self.trackers: dict[int, PrefixTracker] = {}
        self._topic = topic
        self._committed: dict[int, int] = {}

    def take(self, partitions: Mapping[int, int]) -> None:
        """The partitions are assigned, each from the position given."""
        for partition, position in partitions.items():
            self.trackers[partition] = PrefixTracker(position)
            self._committed[partition] = position

    def give(self, partitions: Iterable[int]) -> list[int]:
        """The partitions are revoked. Returns those of them that were held."""
        given = [partition for partition in partitions if self.trackers.pop(partition, None) is not None]
        for partition in given:
            del self._committed[partition]
        return given

    def begin(self, records: Iterable[Record]) -> list[tuple[Record, PrefixTracker]]:
        """Starts those of ``records`` whose partition is held. Returns each with the tracker to finish it at.

        To be called as soon as they were polled. A partition that was revoked and assigned again has a new tracker and
        gets the same records again; records that were polled before must not reach that tracker.
        """
        begun = []
        for record in records:
            tracker = self.trackers.get(record.partition)
            if tracker is not None:  # else it went to another instance, which reads this again
                tracker.start(record.offset)
                begun.append((record, tracker))
        return begun

    async def commit(self, consumer: GroupConsumer | None) -> None:
        """Commit what is finished. What could not be committed is tried again with the next call."""
        moved = {
            partition: tracker.position
            for partition, tracker in self.trackers.items()
            if tracker.position > self._committed[partition]
        }
        if not moved or consumer is None or not await consumer.commit(moved):
            return
        for partition, position in moved.items():
            if partition in self._committed:
                self._committed[partition] = max(self._committed[partition], position)

    async def lags(self, log: Log) -> AsyncIterator[tuple[int, int]]:
        """Each partition and by how many records it is behind, where the log answers. Raises LogFailed."""
        for partition in tuple(self.trackers):
            try:
                end = await log.offset_at(self._topic, partition, round(time.time() * 1000) + _DAY_MS)
            except LogFailed:
                raise
            except LogError as error:
                _LOG.info("the end of %s[%d] is not known now: %s", self._topic, partition, error)
                continue
            tracker = self.trackers.get(partition)
            if tracker is not None:
                yield partition, max(0, end - tracker.position)
