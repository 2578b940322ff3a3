"""What a process is made of."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from greenroom.fabric.lifecycle.tasks import Tasks, reached


class Service(Protocol):
    """A part of a process with a life of its own: started in order, stopped in reverse."""

    @property
    def name(self) -> str: ...

    @property
    def unready(self) -> str | None:
        """Why it does not do its work now, for whoever asks /health; None: it does."""
        ...

    async def start(self) -> None:
        """Returns once others may rely on it. Raises what keeps it from starting; then it is not stopped."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Nothing new from now on; returns when what is under way has ended, or after ``timeout_s``."""
        ...

    async def stop(self) -> None:
        """Ends what is left, and every task. Only after ``start`` has returned."""
        ...

    async def failed(self) -> BaseException:
        """Waits until something that must go on has ended: with what. As long as nothing does, it waits."""
        ...


class Part:
    """A Service whose parts are all there already: override what differs. ``tasks`` are its background tasks."""

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
    """A Part that is one task, ``run``: it sets ``begun`` once others may rely on it, goes on until ``ending`` is set,
    and then has up to ``drain_s`` to bring what is under way to its end."""

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
