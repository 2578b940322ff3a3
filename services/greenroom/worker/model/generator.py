"""The batch loop as an asyncio Generator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from greenroom.core.generation import Event, Finished, GenerationRequest, ServedModel
from greenroom.moe.batch.batch_loop import BatchLoop


class LoopGenerator:
    """Generates on a BatchLoop of this process. Used from one event loop.

    Tokens wait here for their reader, at most as many as the request may generate; the batch loop never waits.
    """

    def __init__(self, loop: BatchLoop, model: ServedModel) -> None:
        self._loop = loop
        self._model = model

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def ready(self) -> bool:
        return self._loop.ready

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """As ``greenroom.core.generation.Generator`` has it. Raises LoopStopped too, where nothing is taken."""
        events = _Events(asyncio.get_running_loop())
        number = self._loop.submit(request, events.put)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            # Nothing happens where it has ended: a number, unlike an id, is never used again.
            self._loop.cancel(number)


class _Events:
    """One request's events on their way from the batch loop's thread to the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._told = False

    def put(self, event: Event) -> None:
        """On the batch loop's thread. Raises RuntimeError where the event loop is closed."""
        self._events.append(event)
        if not self._told:  # one wake-up for however many events come before the reader looks
            self._told = True
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> Event:
        while not self._events:
            await self._arrived.wait()
            self._arrived.clear()
            self._told = False
        return self._events.popleft()
