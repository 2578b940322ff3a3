"""Task-type extraction as a service: ``requests`` in, ``tasks`` out, nothing lost in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from greenroom.fabric.committable_offsets import PrefixTracker
from greenroom.fabric.group_positions import GroupPositions
from greenroom.fabric.lifecycle import Runner
from greenroom.fabric.log import GroupConsumer, Log, Record
from greenroom.fabric.topics import REQUESTS
from greenroom.tasktype.carrier import Carrier
from greenroom.tasktype.config import TaskTypeConfig
from greenroom.tasktype.extractor import Extractor
from greenroom.tasktype.metrics import TaskTypeMetrics

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_AT_ONCE = 64


class TaskTypeService(Runner):
    """One instance; the partitions of ``requests`` are shared among those of the group.

    Records of one key are carried one after the other, those of different keys side by side, ``max_in_flight`` of
    them at once. A position is committed when all before it has been carried to its end. So what is read again,
    after a crash or when a partition moves, is appended again: at least once, in order within a key.
    """

    def __init__(
        self,
        config: TaskTypeConfig,
        log: Log,
        extractor: Extractor,
        metrics: TaskTypeMetrics,
        *,
        after_append: Callable[[], None] | None = None,
    ) -> None:
        super().__init__("tasktype")
        self._config = config
        self._log = log
        self._metrics = metrics
        self._carrier = Carrier(config, log, extractor, metrics, after_append=after_append)
        self._consumer: GroupConsumer | None = None
        self._held = GroupPositions(REQUESTS)
        self._under_way: dict[asyncio.Task[None], int] = {}
        self._bytes = 0
        self._last_of: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    # -- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until ``end``; it has begun when it has joined its group. Raises LogUnavailable where the log was never
        there, LogFailed where it can not be used any more, and whatever else should not happen."""
        await self._carrier.start()
        self._consumer = self._log.group(REQUESTS, self._config.group, self)
        try:
            async with self._consumer as consumer:
                self.begun.set()
                async with asyncio.TaskGroup() as tasks:
                    await self._serve(consumer, tasks)
                await self._commit()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _serve(self, consumer: GroupConsumer, tasks: asyncio.TaskGroup) -> None:
        helpers = [tasks.create_task(self._commit_always()), tasks.create_task(self._watch_lag())]
        while not self.ending.is_set():
            await self._read(consumer, tasks)
        await self._finish(set(self._under_way), self.drain_s)
        for helper in helpers:
            helper.cancel()

    def end(self, drain_s: float) -> None:
        """Read nothing more; what was read is carried to its end, for up to ``drain_s``, and committed."""
        super().end(drain_s)
        self._changed.set()

    @property
    def unready(self) -> str | None:
        if self.ending.is_set():
            return "it is stopping"
        if not self.begun.is_set():
            return "it has not joined its group yet"
        stuck_s = self._carrier.stuck_s
        if stuck_s > self._config.stuck_after_s:
            return f"the log has not taken an append for {stuck_s:.0f} s"
        return None

    # -- what the consumer tells ---------------------------------------------------------------------------------

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        self._held.take(partitions)
        self._changed.set()

    async def revoked(self, partitions: Sequence[int]) -> None:
        """What is under way gets a moment, so that whoever is next reads less of it again."""
        gone = set(partitions)
        tasks = {task for task, partition in self._under_way.items() if partition in gone}
        await self._finish(tasks, self._config.revoke_s)
        await self._commit()
        for partition in self._held.give(gone):
            self._metrics.not_held(partition)

    # -- reading and carrying ------------------------------------------------------------------------------------

    async def _read(self, consumer: GroupConsumer, tasks: asyncio.TaskGroup) -> None:
        room = min(_AT_ONCE, self._config.max_in_flight - len(self._under_way))
        if (
            room <= 0
            or self._bytes >= self._config.max_in_flight_bytes
            or any(tracker.span >= self._config.max_span for tracker in self._held.trackers.values())
        ):
            self._changed.clear()
            await self._changed.wait()
            return
        for record, tracker in self._held.begin(await consumer.poll(_POLL_S, room)):
            self._begin(record, tracker, tasks)

    def _begin(self, record: Record, tracker: PrefixTracker, tasks: asyncio.TaskGroup) -> None:
        lane = (record.partition, record.key or b"")
        task = tasks.create_task(self._carry(record, tracker, self._last_of.get(lane)))
        self._last_of[lane] = task
        self._under_way[task] = record.partition
        self._metrics.in_flight.inc()
        size = len(record.value or b"")
        self._bytes += size
        task.add_done_callback(lambda done: self._ended(done, lane, size))

    async def _carry(self, record: Record, tracker: PrefixTracker, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
            if before.cancelled() or before.exception() is not None:
                raise asyncio.CancelledError  # not passed on, so nothing behind it is either: all are read again
        await self._carrier.carry(record)
        tracker.finish(record.offset)

    def _ended(self, task: asyncio.Task[None], lane: tuple[int, bytes], size: int) -> None:
        del self._under_way[task]
        self._bytes -= size
        self._metrics.in_flight.dec()
        if self._last_of.get(lane) is task:
            del self._last_of[lane]
        self._changed.set()

    async def _finish(self, tasks: set[asyncio.Task[None]], within_s: float) -> None:
        """Wait for ``tasks``; those that are not done ``within_s`` are cancelled, and read again by whoever is next."""
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        if late:
            _LOG.warning("%d records were left to whoever reads their partitions next", len(late))
            await asyncio.wait(late)

    # -- committing ----------------------------------------------------------------------------------------------

    async def _commit_always(self) -> None:
        while True:
            await asyncio.sleep(self._config.commit_every_s)
            await self._commit()

    async def _commit(self) -> None:
        await self._held.commit(self._consumer)

    async def _watch_lag(self) -> None:
        while True:
            async for partition, behind in self._held.lags(self._log):
                self._metrics.lag(partition, behind)
            await asyncio.sleep(self._config.lag_every_s)
