"""An instance announces itself on the topic ``members``, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from greenroom.core.messages import Member, encode
from greenroom.fabric.log.base import Log, LogError, LogUnavailable
from greenroom.fabric.topics import MEMBERS

_LOG = logging.getLogger(__name__)
_CHANGES_APART_S = 0.25


class Announcer:
    """Announces what ``say`` returns: at the start, every third of its ``ttl_ms``, and soon after ``changed``. At the
    end it announces that the instance has left.

    ``say`` is called on the event loop before every announcement, so what it returns is current. An unchanged member is
    announced only when it is time. Where the log is away it tries again, as often.
    """

    def __init__(self, log: Log, say: Callable[[], Member]) -> None:
        self._log = log
        self._say = say
        self._news = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: Member | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Returns when it is announced. Raises LogUnavailable where that takes too long."""
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
        """``say`` may return something else now. It is announced soon, at most four times a second."""
        self._news.set()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Announces that the instance has left. Where that fails, its record grows old."""
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
