"""Calls to one thread: how many may wait is bounded, and each has a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

R = TypeVar("R")


class Crowded(Exception):
    """Too many calls wait already."""


class BoundedThread:
    """At most ``most`` calls to ``executor`` wait or are under way. A call past its deadline is passed over when its
    turn comes, and counts until then: a thread that hangs gathers no more than ``most``."""

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor = executor
        self._most = most
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def call(self, within_s: float, work: Callable[[], R]) -> R:
        """What ``work`` returns or raises. Raises Crowded, TimeoutError after ``within_s``."""
        if self._count >= self._most:
            raise Crowded
        until = time.monotonic() + within_s

        def in_time() -> R:
            if time.monotonic() >= until:
                raise TimeoutError
            return work()

        future = asyncio.get_running_loop().run_in_executor(self._executor, in_time)
        self._count += 1
        future.add_done_callback(self._done)
        async with asyncio.timeout(within_s):
            return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[R]) -> None:
        self._count -= 1
        if not future.cancelled():
            future.exception()  # retrieved, also where the caller has given up
