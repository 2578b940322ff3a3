"""Background tasks that have an owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from greenroom.core.errors import InvalidConfig

_LOG = logging.getLogger(__name__)


class Ended(Exception):
    """A task that was to go on for ever has returned."""


async def reached(point: asyncio.Event, task: asyncio.Task[Any]) -> None:
    """Returns when ``task`` has set ``point`` or has ended. Raises the error that it ended with."""
    waiting = asyncio.create_task(point.wait())
    try:
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()


class Tasks:
    """Tasks of one owner, ended together. Failures are logged; ``failed`` returns the first one."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Any], *, name: str, forever: bool = False) -> asyncio.Task[Any]:
        """Run ``work`` in the background. ``forever``: to return is a failure too.

        Raises RuntimeError once the tasks have been stopped.
        """
        if self._stopping:
            work.close()
            raise RuntimeError(f"{self._owner} is stopping: {name} is not started any more")
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended_for_ever if forever else self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task, error)

    def _ended_for_ever(self, task: asyncio.Task[Any]) -> None:
        self._ended(task)
        if not self._stopping and (task.cancelled() or task.exception() is None):
            self._fail(task, Ended(f"{task.get_name()} has ended"))

    def _fail(self, task: asyncio.Task[Any], error: BaseException) -> None:
        # A wrong setting is no fault of the code, so its traceback is of no use.
        told = isinstance(error, InvalidConfig)
        _LOG.error("%s: %s failed: %s", self._owner, task.get_name(), error, exc_info=None if told else error)
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def failed(self) -> BaseException:
        """Waits until one of them fails. Returns its error."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Cancels all tasks and waits until they have ended. None can be started from now on."""
        self._stopping = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=timeout_s)
            for task in left:
                _LOG.error("%s: %s did not end within %g seconds", self._owner, task.get_name(), timeout_s)
