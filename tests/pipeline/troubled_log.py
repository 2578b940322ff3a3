"""A log that loses acknowledgements and refuses appends, as its test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from greenroom.fabric.log import AppendNotSent, AppendRefused, AppendUnknown, Assignment, Headers, LogFailed, Position
from greenroom.fabric.log.memory.groups import MemoryConsumer, MemoryGroup
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog

Trouble = Callable[[str, bytes | None], str | None]
"""Of a topic and a value: None, or ``lost`` (not appended, unknown), ``landed`` (appended, unknown), ``refused``,
``unsent`` (there is no broker), ``forbidden`` (not authorised), or ``held`` (not before ``release``)."""


def no_trouble(topic: str, value: bytes | None) -> str | None:
    return None


def in_turn(topic: str, *troubles: str) -> Trouble:
    """One after the other of what is appended to ``topic``."""
    left = list(troubles)

    def next_trouble(to: str, value: bytes | None) -> str | None:
        return left.pop(0) if to == topic and left else None

    return next_trouble


class TroubledLog(MemoryLog):
    """``lose_held``: what was held is lost when it is released. ``dead``: its user has died, so nothing that it still
    does on its way out takes effect."""

    def __init__(self, broker: MemoryBroker, trouble: Trouble = no_trouble) -> None:
        super().__init__(broker)
        self.trouble = trouble
        self.dead = False
        self.lose_held = False
        self.shown_partitions: int | None = None
        self.appends: list[tuple[str, bytes | None]] = []
        self._released = asyncio.Event()
        self.holding = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    def group(self, topic: str, group: str, assignment: Assignment) -> MemoryConsumer:
        return _Mortal(self, lambda: self.broker.group(topic, group), assignment)

    async def partitions(self, topic: str) -> int:
        return self.shown_partitions or await super().partitions(topic)

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
        self.appends.append((topic, value))
        await asyncio.sleep(0)  # as a broker's answer would
        if self.dead:
            raise AppendUnknown("it has died")
        trouble = self.trouble(topic, value)
        if trouble == "held":
            self.holding.set()
            await self._released.wait()
            if self.lose_held:
                raise AppendUnknown("no answer came")
        if trouble == "lost":
            raise AppendUnknown("no answer came")
        if trouble == "refused":
            raise AppendRefused("it does not want it")
        if trouble == "unsent":
            raise AppendNotSent("no broker took it in time")
        if trouble == "forbidden":
            raise LogFailed(f"appending to {topic}: not authorised")
        position = await super().append(
            topic, value, key=key, partition=partition, headers=headers, timeout_s=timeout_s
        )
        if trouble == "landed":
            raise AppendUnknown("no answer came")
        return position


class _Mortal(MemoryConsumer):
    def __init__(self, log: TroubledLog, find: Callable[[], MemoryGroup], assignment: Assignment) -> None:
        super().__init__(find, assignment)
        self._log = log

    async def commit(self, positions: Mapping[int, int]) -> bool:
        return False if self._log.dead else await super().commit(positions)
