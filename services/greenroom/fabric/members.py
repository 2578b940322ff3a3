"""Who is here: every instance says so on ``members``, again and again, and reads there who else is."""

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
from greenroom.core.messages import Member, MemberKind, Undecodable, decode, encode
from greenroom.fabric.log.base import Log, LogError, LogUnavailable, Reader, Record
from greenroom.fabric.topics import MEMBERS

_LOG = logging.getLogger(__name__)
_CHANGES_APART_S = 0.25
_BLIND_S = 5.0
"""Longer without knowing that all was heard, and the time in between does not count as anyone's silence."""
_SKEW_MS = 60_000.0
_REMEMBERED = 10_000


class Announcer:
    """Says what ``say`` returns: at the start, every third of its ``ttl_ms``, and soon after ``changed``; at the end,
    that the instance has left.

    ``say`` is called on the event loop whenever something may be said, so what it returns is current; what is the same
    as before is said only when it is time. Where the log is away it tries again, as often.
    """

    def __init__(self, log: Log, say: Callable[[], Member]) -> None:
        self._log = log
        self._say = say
        self._news = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: Member | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Returns when it has been said. Raises LogUnavailable where that takes too long."""
        self._task = asyncio.create_task(self._run(), name="announcer")
        first = asyncio.create_task(self._first.wait())
        try:
            await asyncio.wait([first, self._task], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            if not self._first.is_set():
                raise LogUnavailable(f"could not say on {MEMBERS} within {timeout_s:g} s that we are here")
        except BaseException:
            await self._cancel()
            raise
        finally:
            first.cancel()

    def changed(self) -> None:
        """What ``say`` returns may be different now: it is said soon, at most four times a second."""
        self._news.set()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Says that the instance has left. Where that can not be said, its record grows old."""
        if self._task is None:
            return
        await self._cancel()
        instance = (self._said or self._say()).instance
        try:
            await self._log.append(MEMBERS, None, key=instance.encode(), timeout_s=timeout_s)
        except LogError as error:
            _LOG.warning("could not say on %s that %s has left: %s", MEMBERS, instance, error)

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._news.clear()
            try:
                member = self._say()
            except Exception:
                if not self._first.is_set():
                    raise
                _LOG.exception("what is said on %s could not be made up", MEMBERS)
                await asyncio.sleep(_CHANGES_APART_S)
                continue
            beat_s = member.ttl_ms / 3000.0
            if member != self._said or loop.time() >= due:
                said = await self._announce(member, beat_s)
                due = loop.time() + (beat_s if said else min(beat_s, 1.0))
            await asyncio.sleep(min(_CHANGES_APART_S, beat_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._news.wait()

    async def _announce(self, member: Member, timeout_s: float) -> bool:
        try:
            await self._log.append(MEMBERS, encode(member), key=member.instance.encode(), timeout_s=max(1.0, timeout_s))
        except LogError as error:
            _LOG.warning("could not say on %s that %s is here: %s", MEMBERS, member.instance, error)
            return False
        self._said = member
        self._first.set()
        return True


@dataclass(slots=True)
class _Seen:
    member: Member
    stamp_ms: int
    """The broker's, of its last record."""
    heard_s: float = 0.0
    """On the directory's clock; not known before it is ready."""


class Directory:
    """Who is here, as read from ``members``.

    Ready when the topic has been read to its end; from then on it follows. Its clock goes only while it is known that
    everything is read: who can not be heard, for the log is away or this process was stopped, is not therefore gone.
    It never ends by itself: where reading fails it begins anew from the earliest record, not ready until it has caught
    up. ``look_s``: how often it asks for the topic's end, and looks who was silent for too long.
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
        self.unreadable = 0
        """Records that could not be read. There are no dead letters of them: what was meant is said again."""
        self._gone: OrderedDict[str, _Seen | None] = OrderedDict()
        """Those that were silent with what was last seen of them; None: it said that it left."""
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
        """None for one that is not here, or not known (yet)."""
        seen = self._seen.get(instance)
        return None if seen is None else seen.member

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]:
        """Those of a kind, of one pool where it is named, by instance."""
        return [
            seen.member
            for _, seen in sorted(self._seen.items())
            if seen.member.member == kind and pool in (None, seen.member.pool)
        ]

    def gone(self, instance: str, *, lifetimes: float = 1.0) -> bool:
        """Whether it was here and certainly is no more: it has said so, or was silent for longer than so many of its
        ttl."""
        if instance not in self._gone:
            return False
        seen = self._gone[instance]
        return seen is None or self._silent(seen, lifetimes)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call it on the event loop after every change. Returns what ends that."""
        self._told.append(callback)
        return lambda: self._told.remove(callback) if callback in self._told else None

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float) -> bool:
        """Wait until ``predicate`` holds; whether it does."""
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
        """Ask for the end, read to it, and know then that all was heard that had been said when it was asked for."""
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
        return before is None or before.member != member

    def _now_s(self, now: float) -> float:
        """The directory's clock."""
        if self._listened_at is None:
            return self._heard_s
        return self._heard_s + min(max(0.0, now - self._listened_at), _BLIND_S)

    def _listened(self, asked: float) -> bool:
        """All has been read that had been said by ``asked``. Whether that changed who is here."""
        if self._listened_at is None or asked - self._listened_at <= _BLIND_S:
            self._heard_s = self._now_s(asked)
        self._listened_at = asked
        first = not self.ready
        if first:  # how old the records are is certain from each other's stamps, and from our clock within its skew
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
        self._seen.pop(instance, None)
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
