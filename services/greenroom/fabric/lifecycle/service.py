"""The parts that a process is made of."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from greenroom.fabric.lifecycle.tasks import Tasks, reached


class Service(Protocol):
    """A part of a process. Parts are started in order and stopped in reverse."""

    @property
    def name(self) -> str: ...

    @property
    def unready(self) -> str | None:
        """Why it does not do its work now, for /health; None: it does."""
        ...

    async def start(self) -> None:
        """Returns once other parts may rely on it. Raises where it can not start; then ``stop`` is not called."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no new work. Returns when the running work has ended, or after ``timeout_s``."""
        ...

    async def stop(self) -> None:
        """Ends what is left, and every task. Called only after ``start`` has returned."""
        ...

    async def failed(self) -> BaseException:
        """Waits until something has ended that must go on. Returns the error it ended with."""
        ...


class Part:
    """A Service with a default for everything; override what differs. ``tasks``: its background tasks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks = Tasks(name)

    @property
    def unready(self) -> str | None:
        return None

    async def start(self) -> None:
        pass

    async def drain(self, timeout_s: float) -> None:
        pass

    async def stop(self) -> None:
        await self.tasks.stop()

    async def failed(self) -> BaseException:
        return await self.tasks.failed()


class Runner(Part, ABC):
    """A Part that is one task, ``run``. It sets ``begun`` once other parts may rely on it and goes on until ``ending``
    is set. Then it has up to ``drain_s`` to finish its running work."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun = asyncio.Event()
        self.ending = asyncio.Event()
        self.drain_s = 0.0
        self._running: asyncio.Task[None] | None = None

    @abstractmethod
    async def run(self) -> None: ...

    def end(self, drain_s: float) -> None:
        """``run`` is to return, after up to ``drain_s``."""
        self.drain_s = drain_s
        self.ending.set()

    async def start(self) -> None:
        """Returns when it has begun. Raises what ``run`` raised before."""
        self._running = self.tasks.start(self.run(), name=f"{self.name} itself")
        try:
            await reached(self.begun, self._running)
        except BaseException:
            await self.tasks.stop()
            raise

    async def drain(self, timeout_s: float) -> None:
        self.end(timeout_s)
        if self._running is not None:
            await asyncio.wait([self._running])


class Entered(Part):
    """A context manager, such as a log or a dialer, as a Service: entered at the start, left at the end."""

    def __init__(self, name: str, manager: AbstractAsyncContextManager[Any]) -> None:
        super().__init__(name)
        self._manager = manager
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(self._manager)

    async def stop(self) -> None:
        await self._stack.aclose()
        await super().stop()
