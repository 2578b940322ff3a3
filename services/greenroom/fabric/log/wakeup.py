"""Waiting for a wake-up with a deadline, at the cost of one future."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Wakes the one task that waits for it. A call of ``wake`` while no task waits is lost: look first, then wait."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until ``wake`` is called, at most ``timeout_s``."""
        if self._waiter is not None:
            raise RuntimeError("two tasks poll the same consumer or reader: each needs its own")
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(max(0.0, timeout_s), self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
