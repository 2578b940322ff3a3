"""One pool that this process holds: its state machine between the log and the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

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
from greenroom.fabric.log import AppendRefused, Log, LogError, Reader, Record
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.rpc import Dialer
from greenroom.fabric.topics import JOURNAL, TASKS
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.scheduler.config import SchedulerConfig
from greenroom.scheduler.dead_letters import SERVICE, DeadLetters, dead_letter_of, write_dead_letter
from greenroom.scheduler.effects import (
    Append,
    CancelRun,
    Deposed,
    Disconnect,
    Effect,
    ListRuns,
    Release,
    Run,
    WriteDeadLetter,
)
from greenroom.scheduler.estimates import Estimates
from greenroom.scheduler.pool import Pool
from greenroom.scheduler.pool_state import Role
from greenroom.scheduler.trace_contexts import TraceContexts
from greenroom.scheduler.worker_calls import WorkerCalls

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_INBOX = 1024
_APPEND_S = 60.0
"""A record is appended anew only when the append before has ended. So an outage costs one copy of it a minute."""
_GATEWAY_LIFETIMES = 10.0
_DEPTH_STEPS = 16
_MOST_MACHINES = 64
"""Of workers that are compared with the profile's: a fleet of more kinds has been told enough."""


class PoolRunner:
    """One pool, from the assignment of its partition to the revocation."""

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
        self.pool = Pool(f"{instance}/{number}", config.pool, policy, estimates=Estimates(profile))
        self.deposed = False
        self._position = position
        self._config = config
        self._log = log
        self._directory = directory
        self._profile = profile
        self._machines: set[str] = set()
        self._clock = clock
        self._inbox: deque[Record] = deque()
        self._came = asyncio.Event()
        self.trace_contexts = TraceContexts(self.pool)
        self._workers = WorkerCalls(self.pool, self.trace_contexts, dialer, clock, self._act)
        self._appends: set[asyncio.Task[None]] = set()
        self._journal_dead_letters = DeadLetters(log)
        self._told_waiting = 0
        """How many were announced to wait."""
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
        """Runs until it is cancelled, or another scheduler holds the pool."""
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
                await self._journal_dead_letters.write_all()
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
                        group.create_task(self._journal_dead_letters.run(), name=f"dead letters of pool {self.number}"),
                        group.create_task(self._take_tasks(), name=f"tasks of pool {self.number}"),
                        group.create_task(self._tick(), name=f"clock of pool {self.number}"),
                    ]
                    await asyncio.wait([following])  # ends when another scheduler holds the pool
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
                self._journal_dead_letters.add(dead_letter_of(record, error), record.headers)
                continue
            if isinstance(content, Claim) and self.pool.role is Role.STANDBY:
                self._journal_dead_letters.forget_before(content.read_to)  # the claimant has written these
            effects = self.pool.journal(record.offset, content, self._clock())
            if isinstance(content, Outcome):
                self.trace_contexts.ended(content.request_id)
            self._act(effects)

    async def _follow(self, reader: Reader) -> None:
        while not self.deposed:
            self._read_journal(await reader.poll(_POLL_S))
            self._look_at_depth()
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
                    await write_dead_letter(self._log, dead_letter_of(record, error), record.headers)
                    if self.deposed:
                        return  # the scheduler that holds the pool now reads it again
                    request_id = error.request_id
                    effects = self.pool.unreadable(record.offset, request_id, str(error), self._clock())
                else:
                    request_id = content.request.request_id if isinstance(content, Task) else content.request_id
                    effects = self.pool.task(record.offset, content, self._clock())
                if request_id is not None:
                    self.trace_contexts.came(request_id, record)
                self._act(effects)
            self._look_at_depth()

    async def _write_dead_letter(self, effect: WriteDeadLetter) -> None:
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
        with self.trace_contexts.span("dead letter", effect.request_id, "producer"):
            await write_dead_letter(self._log, letter, telemetry.inject())
        self._act(self.pool.dead_letter_written(effect.request_id, self._clock()))

    async def _append(self, effect: Append) -> None:
        with self.trace_contexts.span("outcome", effect.request_id, "producer") as span:
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
            self._compare_machines(member)
        for worker in self._workers.known - {member.instance for member in present}:
            if self._directory.gone(worker):
                self._workers.leave(worker)

    def _compare_machines(self, worker: Member) -> None:
        """Say once of each machine that the profile's times were not measured on it."""
        if self._profile is None or worker.machine in self._machines or len(self._machines) >= _MOST_MACHINES:
            return
        self._machines.add(worker.machine)
        if worker.machine and (said := self._profile.said_of_machine(worker.machine)) is not None:
            _LOG.warning("worker %s: %s", worker.instance, said)

    def _look_at_gateways(self) -> None:
        """Rule 7. A gateway that is only slow to announce itself still has its clients."""
        for gateway in self.pool.gateways:
            if self._directory.gone(gateway, lifetimes=_GATEWAY_LIFETIMES):
                _LOG.warning("gateway %s has gone: its requests without a key are ended", gateway)
                self._act(self.pool.gateway_gone(gateway, self._clock()))

    def _look_at_depth(self) -> None:
        if worth_telling(self._told_waiting, len(self.pool.waiting), self.pool.config.max_waiting):
            self._announcer.changed()

    def _member(self) -> Member:
        self._told_waiting = len(self.pool.waiting)
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
                case WriteDeadLetter():
                    self._spawn(self._write_dead_letter(effect), effect.request_id)
                case Run() | ListRuns() | CancelRun() | Release():
                    self._workers.carry_out(effect)
                case Disconnect(worker):
                    _LOG.info("worker %s has no lease any more", worker)
                    self._workers.disconnect(worker)
                case Deposed(by):
                    _LOG.warning("pool %d is held by %s now", self.number, by)
                    self.deposed = True

    def _spawn(self, work: Coroutine[Any, Any, None], request_id: str) -> None:
        context = fresh_context(request_id)  # the record may be of another request than the one that led to it
        task = asyncio.create_task(work, context=context)
        self._appends.add(task)
        task.add_done_callback(self._appended, context=context)

    def _appended(self, task: asyncio.Task[None]) -> None:
        self._appends.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("writing to the log failed by a defect", exc_info=error)


def worth_telling(told: int, waiting: int, limit: int) -> bool:
    """Whether gateways are told at once how many requests wait. ``told``: what they were told last.

    Every process reads each announcement. A gateway refuses by the limit, and counts its own requests too, so a small
    change can wait for the next announcement.
    """
    moved = abs(waiting - told)
    return moved >= max(1, limit // _DEPTH_STEPS) or (moved > 0 and (waiting == 0 or waiting >= limit))
