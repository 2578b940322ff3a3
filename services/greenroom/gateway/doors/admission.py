"""Whether a request may come in: the server must be ready, and not full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from greenroom.gateway.errors import saturated, unavailable


class Admission:
    """Counts the requests that are being answered. After ``drain`` no new one is let in."""

    def __init__(self, max_in_flight: int, ready: Callable[[], bool]) -> None:
        self._max_in_flight = max_in_flight
        self._ready = ready
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.draining = False

    @property
    def unready(self) -> str | None:
        """Why no request is let in now. None where requests are."""
        if self.draining:
            return "the server is stopping and takes no new requests"
        return None if self._ready() else "the server is not ready yet"

    def check_ready(self) -> None:
        """Raises ApiError (503) with the reason."""
        reason = self.unready
        if reason is not None:
            code, after_s = ("draining", 5.0) if self.draining else ("not_ready", 1.0)
            raise unavailable(reason, code, retry_after_s=after_s)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """The request counts while the context is open. Raises ApiError: 503 if not ready, 429 if full."""
        self.check_ready()
        if self.in_flight >= self._max_in_flight:
            raise saturated(f"{self.in_flight} requests are being answered, as many as are allowed", 1.0)
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    def drain(self) -> None:
        self.draining = True

    async def idle(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` until no request is left to answer. Returns whether none is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
