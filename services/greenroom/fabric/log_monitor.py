"""Monitors the log: its acknowledgements say whether it answers, and how far its clock is from this machine's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from greenroom.core.clock import SteadyClock
from greenroom.core.errors import GreenroomError
from greenroom.fabric.lifecycle.service import Part
from greenroom.fabric.log.base import Assignment, GroupConsumer, Headers, Log, LogError, Position, Reader, Topic
from greenroom.fabric.log.health import HealthConfig, LogHealth, Skew
from greenroom.fabric.topics import MEMBERS

_LOG = logging.getLogger(__name__)
_EVERY_S = 2.0
_APPEND_S = 10.0
_TELL_SKEW_S = 600.0


class ClockSkewed(GreenroomError):
    """This machine's clock differs from the log's by more than the protocol allows for."""


class MonitoredLog:
    """``log``, with its ``health`` as its acknowledgements show it. See Log."""

    def __init__(
        self, log: Log, config: HealthConfig | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        """``clock``: Unix milliseconds that never jump; deadlines are counted on it."""
        self._log = log
        self.clock = clock or SteadyClock()
        self.health = LogHealth(config, now=self.clock())

    async def __aenter__(self) -> Self:
        await self._log.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._log.__aexit__(kind, error, traceback)

    async def ensure(self, topics: Sequence[Topic]) -> None:
        await self._log.ensure(topics)

    async def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout_s: float = 10.0,
    ) -> Position:
        sent = self.clock()
        position = await self._log.append(
            topic, value, key=key, partition=partition, headers=headers, timeout_s=timeout_s
        )
        self.health.acknowledged(sent, position.timestamp_ms, self.clock())
        return position

    def group(self, topic: str, group: str, assignment: Assignment) -> GroupConsumer:
        return self._log.group(topic, group, assignment)

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> Reader:
        return self._log.reader(topic, partition, start=start)

    async def partitions(self, topic: str) -> int:
        return await self._log.partitions(topic)

    async def identity(self, topic: str) -> str:
        return await self._log.identity(topic)

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return await self._log.offset_at(topic, partition, timestamp_ms)

    async def committed(self, topic: str, group: str, partition: int) -> int | None:
        return await self._log.committed(topic, group, partition)


class LogMonitor(Part):
    """Appends a probe where nothing else was acknowledged for two seconds. The probe is a tombstone on ``members`` for
    a member that never was: readers pass it over, and compaction removes it.

    Not ready while the log acknowledges nothing; ready again by itself. It does not start where the clocks are too far
    apart.
    """

    def __init__(self, log: MonitoredLog, instance: str, *, every_s: float = _EVERY_S) -> None:
        super().__init__("log watch")
        self._log = log
        self._key = f"watch.{instance}".encode()
        self._every_s = every_s
        self._told_at: float | None = None

    @property
    def unready(self) -> str | None:
        return self._log.health.trouble(self._log.clock())

    async def start(self) -> None:
        """Raises ClockSkewed."""
        await self._ask()
        health = self._log.health
        if health.skew is Skew.TOO_MUCH:
            most_s = health.config.most_skew_ms / 1000
            raise ClockSkewed(
                f"{health.told_skew()}; at most {most_s:g} s are allowed, for deadlines are counted on both: set the "
                "clock, as by NTP, here or at the brokers"
            )
        self.tasks.start(self._run(), name="log watch", forever=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            health = self._log.health
            if health.silent_ms(self._log.clock()) >= self._every_s * 1000:
                await self._ask()
            if health.skew is not Skew.FINE:
                self._tell_skew()

    async def _ask(self) -> None:
        try:
            await self._log.append(MEMBERS, None, key=self._key, timeout_s=_APPEND_S)
        except LogError as error:
            _LOG.debug("the log did not acknowledge: %s", error)

    def _tell_skew(self) -> None:
        now = self._log.clock()
        if self._told_at is None or now - self._told_at >= _TELL_SKEW_S * 1000:
            self._told_at = now
            _LOG.warning(
                "%s: requests may expire too early or too late; where the clock was set, or the machine slept, "
                "since this process began, start it anew",
                self._log.health.told_skew(),
            )
