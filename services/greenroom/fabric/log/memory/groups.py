"""Groups of the in-memory log: which member holds which partitions. A rebalance is eager, as Kafka's: all partitions
are revoked, then assigned anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from greenroom.fabric.log.base import Assignment, LogFailed, Record
from greenroom.fabric.log.memory.store import StoredTopic
from greenroom.fabric.log.wakeup import Wakeup

log = logging.getLogger(__name__)


class MemoryGroup:
    """The members of one group on one topic. Rebalances run one after the other, on a task that the group holds."""

    def __init__(self, name: str, stored: StoredTopic, callback_timeout_s: float) -> None:
        self.name = name
        self.stored = stored
        self.callback_timeout_s = callback_timeout_s
        self.committed = stored.committed.setdefault(name, {})
        self.members: list[MemoryConsumer] = []
        self._wanted = 0
        self._settled = 0
        self._task: asyncio.Task[None] | None = None

    async def join(self, member: MemoryConsumer) -> None:
        self.members.append(member)
        self._rebalance()
        while self._task is not None and self._settled != self._wanted:
            await asyncio.shield(self._task)

    async def leave(self, member: MemoryConsumer) -> None:
        """The other members get its partitions shortly."""
        if member in self.members:
            self.members.remove(member)
            await member.let_go()
            self._rebalance()

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._task is not None:
            await self._task

    def _rebalance(self) -> None:
        self._wanted += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._settle(), name=f"rebalance-{self.name}")

    async def _settle(self) -> None:
        while self._settled != self._wanted:
            wanted = self._wanted
            await asyncio.gather(*(member.let_go() for member in self.members))
            members = list(self.members)
            shares: list[list[int]] = [[] for _ in members]
            for number in range(len(self.stored.partitions) if members else 0):
                shares[number % len(members)].append(number)
            await asyncio.gather(*(member.take_on(share) for member, share in zip(members, shares, strict=True)))
            self._settled = wanted


class MemoryConsumer:
    """A member of a MemoryGroup; see GroupConsumer."""

    def __init__(self, group: Callable[[], MemoryGroup], assignment: Assignment) -> None:
        self._find = group
        self._told = assignment
        self._wakeup = Wakeup()
        self._held: dict[int, int] = {}
        """The next offset to read, by partition."""
        self._giving = False
        """Whether ``poll`` returns records: not while the user is told of partitions."""
        self._paused: set[int] = set()
        self._failure: LogFailed | None = None
        self._closed = True
        self._turn = 0
        self._telling = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._group = self._find()
        self._closed = False
        try:
            await self._group.join(self)
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        self._wakeup.wake()
        await self._group.leave(self)

    @property
    def assignment(self) -> frozenset[int]:
        return frozenset(self._held)

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        await asyncio.sleep(0)  # a user that always finds something must not keep the others from running
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise LogFailed(f"the consumer of {self._group.name} is closed")
            try:
                records = self._take(max_records) if self._giving else []
            except LogFailed as error:
                self._failure = error
                raise
            left = until - loop.time()
            if records or left <= 0:
                return records
            await self._wakeup.wait(left)

    def _take(self, max_records: int) -> list[Record]:
        """From each partition in turn, so that a busy one does not starve the others."""
        taken: list[Record] = []
        numbers = [number for number in self._held if number not in self._paused]
        for step in range(len(numbers)):
            number = numbers[(self._turn + step) % len(numbers)]
            records = self._group.stored.partitions[number].read(self._held[number], max_records - len(taken))
            if records:
                self._held[number] = records[-1].offset + 1
                taken += records
                if len(taken) >= max_records:
                    break
        self._turn += 1
        return taken

    async def commit(self, positions: Mapping[int, int]) -> bool:
        if self._failure is not None:
            raise self._failure
        if any(number not in self._held for number in positions):
            return False
        committed = self._group.committed
        for number, offset in positions.items():
            end = self._group.stored.partitions[number].end
            if not 0 <= offset <= end:
                where = f"{self._group.stored.topic.name}/{number}"
                raise ValueError(f"{where} ends at {end}: {offset} can not be committed")
            committed[number] = max(offset, committed.get(number, 0))
        return True

    def pause(self, partitions: Sequence[int]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[int]) -> None:
        self._paused.difference_update(partitions)
        self._wakeup.wake()

    # -- told by the group ---------------------------------------------------------------------------------------

    async def take_on(self, partitions: Sequence[int]) -> None:
        async with self._telling:
            if self._closed or not partitions:
                return
            for number in partitions:
                stored = self._group.stored.partitions[number]
                self._held[number] = self._group.committed.get(number, stored.start)
                stored.listeners.add(self._wakeup)
            await self._tell(self._told.assigned(dict(self._held)), "assigned")
            self._giving = True
        self._wakeup.wake()

    async def let_go(self) -> None:
        self._giving = False
        async with self._telling:
            self._giving = False
            if not self._held:
                return
            await self._tell(self._told.revoked(sorted(self._held)), "revoked")
            for number in self._held:
                self._group.stored.partitions[number].listeners.discard(self._wakeup)
            self._held.clear()

    async def _tell(self, told: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(self._group.callback_timeout_s):
                await told
        except Exception as error:
            log.exception("the user of group %s failed when told what is %s", self._group.name, what)
            if self._failure is None:  # the first one stays
                reason = str(error) or type(error).__name__
                self._failure = LogFailed(f"group {self._group.name}: {what} failed: {reason}")
                self._failure.__cause__ = error
            self._wakeup.wake()
