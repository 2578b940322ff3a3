"""The scheduler as a service: holds the pools that its consumer group gives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from greenroom.core.clock import SteadyClock
from greenroom.core.model_profile import ModelProfile
from greenroom.fabric.lifecycle import Part
from greenroom.fabric.log import GroupConsumer, Log, LogUnavailable
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import Dialer
from greenroom.fabric.topics import TASKS
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.scheduler.config import SchedulerConfig
from greenroom.scheduler.pool_runner import PoolRunner

_LOG = logging.getLogger(__name__)
GROUP = "scheduler"
_POLL_S = 1.0
_PAUSED_POLL_S = 0.05
_REJOIN_S = 1.0


class SchedulerService(Part):
    """Holds the pools that the group gives it, and stands by for the others."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        instance: str,
        log: Log,
        dialer: Dialer,
        directory: Directory,
        policy: Callable[[], PlacementPolicy],
        profile: ModelProfile | None = None,
    ) -> None:
        """``profile``: of the model that the pools serve."""
        super().__init__("scheduler")
        self._config = config
        self._instance = instance
        self._log = log
        self._dialer = dialer
        self._directory = directory
        self._policy = policy
        self._profile = profile
        self._clock = SteadyClock()
        self.runners: dict[int, PoolRunner] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._lives = 0
        self._member = False

    @property
    def unready(self) -> str | None:
        return None if self._member else "it is not a member of its group yet"

    async def start(self) -> None:
        self.tasks.start(self._run(), name="pools", forever=True)

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        for number, position in partitions.items():
            _LOG.info("pool %d is assigned, from task %d", number, position)
            self._begin(number, position)

    async def revoked(self, partitions: Sequence[int]) -> None:
        for number in partitions:
            _LOG.info("pool %d is no longer assigned", number)
            await self._end(number)

    def _begin(self, number: int, position: int) -> None:
        self._lives += 1
        runner = self.runners[number] = PoolRunner(
            number,
            position,
            instance=f"{self._instance}.{self._lives}",
            config=self._config,
            policy=self._policy(),
            log=self._log,
            dialer=self._dialer,
            directory=self._directory,
            clock=self._clock,
            profile=self._profile,
        )
        self._running[number] = asyncio.create_task(runner.run(), name=f"pool {number}")

    async def _end(self, number: int) -> None:
        self.runners.pop(number, None)
        task = self._running.pop(number, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        """Raises LogFailed, and what ended a pool by a defect.

        When another scheduler's claim deposes one of ours, or the log is away while a pool is taken over, this process
        leaves the group and joins it anew. The member that gets the partition then begins from the committed offset.
        """
        try:
            while True:
                try:
                    async with self._log.group(TASKS, GROUP, self) as consumer:
                        self._member = True
                        await self._serve(consumer)
                except LogUnavailable as error:
                    _LOG.warning("the log does not answer: %s", error)
                    await asyncio.sleep(_REJOIN_S)
                self._member = False
                _LOG.info("joining the group anew")
        finally:
            self._member = False
            for number in list(self.runners):
                await self._end(number)

    async def _serve(self, consumer: GroupConsumer) -> None:
        """Until one of our pools is deposed."""
        work = [
            asyncio.create_task(self._read(consumer), name="tasks"),
            asyncio.create_task(self._commit(consumer), name="commits"),
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _read(self, consumer: GroupConsumer) -> None:
        paused: set[int] = set()
        while True:
            for record in await consumer.poll(_POLL_S if not paused else _PAUSED_POLL_S):
                runner = self.runners.get(record.partition)
                if runner is not None:
                    runner.feed(record)
            for number, runner in self.runners.items():
                if runner.full and number not in paused:
                    paused.add(number)
                    consumer.pause([number])
                elif number in paused and not runner.full:
                    paused.discard(number)
                    consumer.resume([number])
            paused &= set(self.runners)
            for task in self._running.values():
                if task.done():
                    task.result()  # a defect that ended it ends this process too
                    return

    async def _commit(self, consumer: GroupConsumer) -> None:
        done: dict[int, int] = {}
        while True:
            await asyncio.sleep(self._config.commit_ms / 1000)
            positions = {number: runner.position for number, runner in self.runners.items()}
            changed = {number: at for number, at in positions.items() if done.get(number) != at}
            if changed and await consumer.commit(changed):
                done.update(changed)
