"""The scheduler as a process: a pool's state machine between the log and the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from greenroom.core.clock import SteadyClock
from greenroom.core.messages import (
    Claim,
    DeadLetter,
    JournalRecord,
    Lost,
    Member,
    MemberKind,
    Outcome,
    Task,
    TaskRecord,
    Undecodable,
    decode,
    encode,
)
from greenroom.core.model_profile import ModelProfile
from greenroom.fabric import telemetry
from greenroom.fabric.current_request import fresh_context
from greenroom.fabric.lifecycle import Part
from greenroom.fabric.log import AppendRefused, GroupConsumer, Log, LogError, LogUnavailable, Reader, Record
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.rpc import Dialer
from greenroom.fabric.topics import JOURNAL, TASKS
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.scheduler.config import SchedulerConfig
from greenroom.scheduler.dead_letters import SERVICE, Letters, letter_of, write_letter
from greenroom.scheduler.effects import (
    Append,
    Bury,
    CancelRun,
    Deposed,
    Disconnect,
    Effect,
    ListRuns,
    Release,
    Run,
)
from greenroom.scheduler.estimates import Foresight
from greenroom.scheduler.pool import Pool, Role
from greenroom.scheduler.trace_contexts import Origins
from greenroom.scheduler.worker_calls import Workers

_LOG = logging.getLogger(__name__)
GROUP = "scheduler"
_POLL_S = 1.0
_PAUSED_POLL_S = 0.05
_REJOIN_S = 1.0
_INBOX = 1024
_APPEND_S = 60.0
"""A record is appended anew only when the append before has ended, so an outage costs a copy of it a minute."""
_GATEWAY_LIFETIMES = 10.0


class PoolRunner:
    """One pool that this process holds: from the assignment of its partition to its revocation."""

    def __init__(
        self,
        number: int,
        position: int,
        *,
        instance: str,
        config: SchedulerConfig,
        policy: PlacementPolicy,
        log: Log,
        dialer: Dialer,
        directory: Directory,
        clock: Callable[[], float],
        profile: ModelProfile | None = None,
    ) -> None:
        self.number = number
        self.pool = Pool(f"{instance}/{number}", config.pool, policy, foresight=Foresight(profile))
        self.deposed = False
        self._position = position
        self._config = config
        self._log = log
        self._directory = directory
        self._clock = clock
        self._inbox: deque[Record] = deque()
        self._came = asyncio.Event()
        self.origins = Origins(self.pool)
        self._workers = Workers(self.pool, self.origins, dialer, clock, self._act)
        self._appends: set[asyncio.Task[None]] = set()
        self._journal_letters = Letters(log)
        self._announcer = Announcer(log, self._member)

    # -- what the service calls ----------------------------------------------------------------------------------

    def feed(self, record: Record) -> None:
        """A record of ``tasks``."""
        self._inbox.append(record)
        self._came.set()

    @property
    def full(self) -> bool:
        """Whether reading should pause."""
        return len(self._inbox) >= _INBOX

    @property
    def position(self) -> int:
        """What may be committed."""
        return self.pool.tracker.position if self.pool.role is not Role.STANDBY else self._position

    async def run(self) -> None:
        """Until it is cancelled, or deposed."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._workers.read_from(await self._log.identity(JOURNAL))
                reader = await stack.enter_async_context(
                    self._log.reader(JOURNAL, self.number, start=await self._journal_start())
                )
                self.pool.take_over(reader.position, self._position)
                end = await reader.end()
                while reader.position < end:
                    self._read_journal(await reader.poll(_POLL_S))
                await self._journal_letters.write_all()
                for member in self._directory.of(MemberKind.WORKER, pool=self.number):
                    self.pool.expect_worker(member.instance)
                _LOG.info("pool %d: journal read to %d, claiming it", self.number, reader.position)
                self._act(self.pool.claim(self._clock()))
                await self._announcer.start()
                stack.push_async_callback(self._announcer.stop)
                stack.callback(self._directory.subscribe(self._look_at_members))
                async with asyncio.TaskGroup() as group:
                    following = group.create_task(self._follow(reader), name=f"journal of pool {self.number}")
                    work = [
                        group.create_task(self._journal_letters.run(), name=f"dead letters of pool {self.number}"),
                        group.create_task(self._take_tasks(), name=f"tasks of pool {self.number}"),
                        group.create_task(self._tick(), name=f"clock of pool {self.number}"),
                    ]
                    await asyncio.wait([following])  # ends when another holds the pool
                    for task in work:
                        task.cancel()
        finally:
            self.pool.release()
            await self._workers.close()
            for task in list(self._appends):
                task.cancel()
            await asyncio.gather(*self._appends, return_exceptions=True)

    # -- the log -------------------------------------------------------------------------------------------------

    async def _journal_start(self) -> int:
        """Rule 4: from the append time of the first uncommitted task, with a margin."""
        since = self._clock()
        async with self._log.reader(TASKS, self.number, start=self._position) as tasks:
            if await tasks.end() > tasks.position:
                first = await tasks.poll(_POLL_S * 10, max_records=1)
                if first:
                    since = min(since, first[0].timestamp_ms)
        margin = self._config.skew_ms + 2 * self._config.pool.reclaim_ms
        return await self._log.offset_at(JOURNAL, self.number, max(0, int(since - margin)))

    def _read_journal(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                content: JournalRecord = decode(record.value or b"", JournalRecord)
            except Undecodable as error:
                self.pool.journal_unreadable(record.offset)
                self._journal_letters.add(letter_of(record, error), record.headers)
                continue
            if isinstance(content, Claim) and self.pool.role is Role.STANDBY:
                self._journal_letters.forget_before(content.read_to)  # whoever claimed had seen these
            effects = self.pool.journal(record.offset, content, self._clock())
            if isinstance(content, Outcome):
                self.origins.ended(content.request_id)
            self._act(effects)

    async def _follow(self, reader: Reader) -> None:
        while not self.deposed:
            self._read_journal(await reader.poll(_POLL_S))
            self._announcer.changed()
            self._came.set()

    async def _take_tasks(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._inbox and self.pool.wants_tasks:
                record = self._inbox.popleft()
                try:
                    content: TaskRecord = decode(record.value or b"", TaskRecord)
                except Undecodable as error:
                    await write_letter(self._log, letter_of(record, error), record.headers)
                    if self.deposed:
                        return  # whoever holds the pool now reads it again
                    request_id = error.request_id
                    effects = self.pool.unreadable(record.offset, request_id, str(error), self._clock())
                else:
                    request_id = content.request.request_id if isinstance(content, Task) else content.request_id
                    effects = self.pool.task(record.offset, content, self._clock())
                if request_id is not None:
                    self.origins.came(request_id, record)
                self._act(effects)
            self._announcer.changed()

    async def _bury(self, effect: Bury) -> None:
        letter = DeadLetter(
            topic=TASKS,
            partition=self.number,
            offset=-1,
            reason=effect.reason,
            service=SERVICE,
            key=effect.request_id.encode(),
            payload=encode(effect.task),
            request_id=effect.request_id,
        )
        with self.origins.span("dead letter", effect.request_id, "producer"):
            await write_letter(self._log, letter, telemetry.inject())
        self._act(self.pool.buried(effect.request_id, self._clock()))

    async def _append(self, effect: Append) -> None:
        with self.origins.span("outcome", effect.request_id, "producer") as span:
            if isinstance(effect.record, Outcome):
                span.set("reason", effect.record.reason.value)
            refused = False
            try:
                await self._log.append(
                    JOURNAL,
                    encode(effect.record),
                    key=(effect.request_id or self.pool.scheduler).encode(),
                    partition=self.number,
                    headers=telemetry.inject(),
                    timeout_s=_APPEND_S,
                )
            except AppendRefused as error:
                refused = True
                _LOG.error("pool %d: the journal refuses a record: %s", self.number, error)
                span.fail(str(error))
            except LogError as error:
                _LOG.warning("pool %d: an append to the journal is not acknowledged: %s", self.number, error)
                span.fail(str(error))
            finally:
                self._act(self.pool.append_ended(effect.record, self._clock(), refused=refused))

    # -- time and members ----------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_ms / 1000)
            self._act(self.pool.tick(self._clock()))
            self._look_at_members()
            self._look_at_gateways()
            self._came.set()

    def _look_at_members(self) -> None:
        if self.pool.epoch < 0:
            return
        present = self._directory.of(MemberKind.WORKER, pool=self.number)
        for member in present:
            self._workers.meet(member)
        for worker in self._workers.known - {member.instance for member in present}:
            if self._directory.gone(worker):
                self._workers.leave(worker)

    def _look_at_gateways(self) -> None:
        """Rule 7. One that is only slow to say that it is here still has its clients."""
        for gateway in self.pool.gateways:
            if self._directory.gone(gateway, lifetimes=_GATEWAY_LIFETIMES):
                _LOG.warning("gateway %s has gone: its requests without a key are ended", gateway)
                self._act(self.pool.gateway_gone(gateway, self._clock()))

    def _member(self) -> Member:
        return Member(
            member=MemberKind.SCHEDULER,
            instance=self.pool.scheduler,
            address="",
            ttl_ms=self._config.ttl_ms,
            pool=self.number,
            depth=self.pool.depth,
        )

    # -- effects -------------------------------------------------------------------------------------------------

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Append():
                    if isinstance(effect.record, Lost):
                        _LOG.warning(
                            "worker %s is lost under %d requests", effect.record.worker, len(effect.record.attempts)
                        )
                    self._spawn(self._append(effect), effect.request_id)
                case Bury():
                    self._spawn(self._bury(effect), effect.request_id)
                case Run() | ListRuns() | CancelRun() | Release():
                    self._workers.carry_out(effect)
                case Disconnect(worker):
                    _LOG.info("worker %s has no lease any more", worker)
                    self._workers.disconnect(worker)
                case Deposed(by):
                    _LOG.warning("pool %d is held by %s now", self.number, by)
                    self.deposed = True

    def _spawn(self, work: Coroutine[Any, Any, None], request_id: str) -> None:
        context = fresh_context(request_id)  # what is written is not always of the request that led to it
        task = asyncio.create_task(work, context=context)
        self._appends.add(task)
        task.add_done_callback(self._appended, context=context)

    def _appended(self, task: asyncio.Task[None]) -> None:
        self._appends.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("writing to the log failed by a defect", exc_info=error)


class SchedulerService(Part):
    """Holds whichever pools the group gives it; the others it stands by for."""

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
        """Raises what ends a pool by a defect, and LogFailed.

        When another scheduler's claim deposes one of ours, or the log is away while a pool is taken over, this process
        leaves the group and joins it anew: whoever the partition is given to then begins from what is committed.
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
                    task.result()  # what ended it by a defect ends this process too
                    return

    async def _commit(self, consumer: GroupConsumer) -> None:
        done: dict[int, int] = {}
        while True:
            await asyncio.sleep(self._config.commit_ms / 1000)
            positions = {number: runner.position for number, runner in self.runners.items()}
            changed = {number: at for number, at in positions.items() if done.get(number) != at}
            if changed and await consumer.commit(changed):
                done.update(changed)
