"""Which instances are here: a directory, read from the topic ``members``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from greenroom.core.errors import GreenroomError
from greenroom.core.messages import Member, MemberKind, Undecodable, decode
from greenroom.fabric.log.base import Log, LogError, LogUnavailable, Reader, Record
from greenroom.fabric.topics import MEMBERS

_LOG = logging.getLogger(__name__)
_BLIND_S = 5.0
"""A longer time without having read to the topic's end does not count as the silence of members."""
_SKEW_MS = 60_000.0
_REMEMBERED = 10_000


@dataclass(slots=True)
class _Seen:
    member: Member
    stamp_ms: int
    """The broker's time of its last record."""
    heard_s: float = 0.0
    """On the directory's clock; not known before it is ready."""


class Directory:
    """The instances that are here, as read from ``members``.

    Ready when the topic has been read to its end; from then on it follows. Its clock goes only while everything is
    known to be read: while the log is away or this process is stopped, no member counts as silent. It never ends by
    itself. Where reading fails it begins anew from the earliest record, and is not ready until it has caught up.
    ``look_s``: how often it asks for the topic's end, and looks for members that were silent for too long.
    """

    def __init__(
        self,
        log: Log,
        *,
        look_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._look_s = look_s
        self._monotonic = clock
        self._unix = unix
        self._heard_s = 0.0
        """The directory's clock: seconds for which it has listened."""
        self._listened_at: float | None = None
        self._newest_ms = 0
        self._seen: dict[str, _Seen] = {}
        self._of: dict[tuple[MemberKind, int | None], list[Member]] = {}
        """What ``of`` has found since the members last changed: it is asked several times for each request."""
        self.unreadable = 0
        """Records that could not be read. They need no dead letters, since members announce themselves again."""
        self._gone: OrderedDict[str, _Seen | None] = OrderedDict()
        """Instances that are gone, with the last that was seen of them; None where one said that it left."""
        self._told: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, timeout_s: float = 60.0) -> None:
        """Returns when it is ready. Raises LogUnavailable where that takes too long."""
        self._task = asyncio.create_task(self._run(), name="directory")
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            await self.stop()
            raise LogUnavailable(f"could not read {MEMBERS} to its end within {timeout_s:g} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def get(self, instance: str) -> Member | None:
        """None for an instance that is not here, or not known yet."""
        seen = self._seen.get(instance)
        return None if seen is None else seen.member

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]:
        """The members of a kind, of one pool where that is given, ordered by instance."""
        found = self._of.get((kind, pool))
        if found is None:
            found = self._of[kind, pool] = [
                seen.member
                for _, seen in sorted(self._seen.items())
                if seen.member.member == kind and pool in (None, seen.member.pool)
            ]
        return list(found)

    def gone(self, instance: str, *, lifetimes: float = 1.0) -> bool:
        """Whether the instance was here and has certainly gone: it said so, or was silent for more than ``lifetimes``
        times its ttl."""
        if instance not in self._gone:
            return False
        seen = self._gone[instance]
        return seen is None or self._silent(seen, lifetimes)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` on the event loop after every change. Returns a function that ends this."""
        self._told.append(callback)
        return lambda: self._told.remove(callback) if callback in self._told else None

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float) -> bool:
        """Wait until ``predicate`` holds. Returns whether it does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return predicate(self)
        return True

    # -- following -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with self._log.reader(MEMBERS, 0) as reader:
                    await self._follow(reader)
            except LogError as error:
                _LOG.warning("reading %s: %s; beginning anew", MEMBERS, error)
            except GreenroomError:
                _LOG.exception("reading %s failed; beginning anew", MEMBERS)
            self._ready.clear()
            self._listened_at = None
            await asyncio.sleep(self._look_s)

    async def _follow(self, reader: Reader) -> None:
        """Ask for the end and read to it: then everything is known that was announced when the end was asked for."""
        loop = asyncio.get_running_loop()
        asked, look = self._monotonic(), loop.time()
        end: int | None = await reader.end()
        while True:
            changed = False
            if end is not None and reader.position >= end:
                changed = self._listened(asked)
                end, look = None, loop.time() + self._look_s
            elif end is None and loop.time() >= look:
                asked, look = self._monotonic(), loop.time() + self._look_s
                with contextlib.suppress(LogUnavailable):
                    end = await reader.end()
            for record in await reader.poll(max(0.0, look - loop.time()) if end is None else 0.05):
                changed |= self._read(record)
            if changed and self.ready:
                self._tell()

    def _read(self, record: Record) -> bool:
        instance = (record.key or b"").decode(errors="replace")
        self._newest_ms = max(self._newest_ms, record.timestamp_ms)
        if record.value is None:
            new = instance in self._seen or instance not in self._gone
            self._leave(instance)
            return new
        try:
            member: Member = decode(record.value, Member)
        except Undecodable as error:
            _LOG.warning("%s: record %d says nothing that can be read: %s", MEMBERS, record.offset, error)
            self.unreadable += 1
            return False
        before = self._seen.get(member.instance)
        self._gone.pop(member.instance, None)
        self._seen[member.instance] = _Seen(member, record.timestamp_ms, self._now_s(self._monotonic()))
        changed = before is None or before.member != member
        if changed:
            self._of.clear()
        return changed

    def _now_s(self, now: float) -> float:
        """The directory's clock."""
        if self._listened_at is None:
            return self._heard_s
        return self._heard_s + min(max(0.0, now - self._listened_at), _BLIND_S)

    def _listened(self, asked: float) -> bool:
        """Everything has been read that was announced by ``asked``. Returns whether that changed who is here."""
        if self._listened_at is None or asked - self._listened_at <= _BLIND_S:
            self._heard_s = self._now_s(asked)
        self._listened_at = asked
        first = not self.ready
        if first:  # the records' age follows from each other's stamps, and from our clock within its skew
            now_ms = max(self._newest_ms, self._unix() * 1000.0 - _SKEW_MS)
            for seen in self._seen.values():
                seen.heard_s = self._heard_s - (now_ms - seen.stamp_ms) / 1000.0
        silent = [name for name, seen in self._seen.items() if self._silent(seen, 1.0)]
        for name in silent:
            self._leave(name, self._seen[name])
        self._ready.set()
        return first or bool(silent)

    def _silent(self, seen: _Seen, lifetimes: float) -> bool:
        return self._heard_s - seen.heard_s > lifetimes * seen.member.ttl_ms / 1000

    def _leave(self, instance: str, seen: _Seen | None = None) -> None:
        if self._seen.pop(instance, None) is not None:
            self._of.clear()
        self._gone[instance] = seen
        self._gone.move_to_end(instance)
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _tell(self) -> None:
        self._changed.set()
        for callback in list(self._told):
            try:
                callback()
            except Exception:
                _LOG.exception("a subscriber to the directory failed")
