"""Requests with an idempotency key: they outlive their clients, and whoever comes again gets the same tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from greenroom.core.errors import Conflict, GreenroomError, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Generator, ServedModel, Token

_LOG = logging.getLogger(__name__)
MAX_KEPT_TOKENS = 500_000
"""All kept replies together; a log-probability counts like a token."""
_LATE_S = 5.0
"""Whatever generates has its own deadline; ours is for one that does not keep it."""
_CLOSE_S = 10.0


@runtime_checkable
class CancelsById(Protocol):
    """A Generator that can end requests which another gateway took, or which go on when their iterator is closed."""

    async def cancel(self, request_id: str) -> None:
        """Nothing happens where it has ended, or was never known."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    request: GenerationRequest
    events: list[Event] = field(default_factory=list)
    error: Exception | None = None
    readers: set[asyncio.Event] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    weight: int = 0
    ended_at: float | None = None

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.weight += 1 + (len(event.logprobs.top) if isinstance(event, Token) and event.logprobs else 0)
        self.wake()

    def wake(self) -> None:
        for reader in self.readers:
            reader.set()


class Attached:
    """A Generator in front of ``generator``. Without an idempotency key a request passes straight through.

    One with a key is read to its end whether or not anybody listens, at the generator's pace, into memory (at most
    what the request may generate). Another of the same id gets all of it from the start; one that asks for something
    else raises Conflict. What came to its own end is kept for ``keep_s``; what did not is forgotten, so a retry runs
    it anew. Invariants: a request runs at most once at a time; ``generator`` never sees an id that is running.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_running: int,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._max_running = max_running
        self._keep_s = keep_s
        self._clock = clock
        self._running: dict[str, _Run] = {}
        self._kept: OrderedDict[str, _Run] = OrderedDict()
        self._kept_weight = 0

    @property
    def model(self) -> ServedModel:
        return self._generator.model

    @property
    def ready(self) -> bool:
        return self._generator.ready

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        return self._follow(request) if request.keyed else self._generator.generate(request)

    def running(self, request_id: str) -> asyncio.Task[None] | None:
        """What ends when the request does, None where it does not run."""
        run = self._running.get(request_id)
        return None if run is None else run.task

    async def cancel(self, request_id: str) -> None:
        """End a request with a key, wherever it runs; its readers get Finished."""
        run = self._running.get(request_id)
        if run is not None and run.task is not None:
            run.task.cancel()
        if isinstance(self._generator, CancelsById):
            await self._generator.cancel(request_id)

    async def close(self) -> None:
        """Ends all that still runs here."""
        tasks = [run.task for run in self._running.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in late:
                _LOG.error("%s did not close within %g seconds", task.get_name(), _CLOSE_S)
        self._kept.clear()
        self._kept_weight = 0

    async def _follow(self, request: GenerationRequest) -> AsyncIterator[Event]:
        run = self._find(request) or self._start(request)
        grew = asyncio.Event()
        run.readers.add(grew)
        try:
            given = 0
            while True:
                while given < len(run.events):
                    event = run.events[given]
                    given += 1
                    yield event
                    if isinstance(event, Finished):
                        return
                if run.error is not None:
                    raise run.error
                grew.clear()
                await grew.wait()
        finally:
            run.readers.discard(grew)

    def _find(self, request: GenerationRequest) -> _Run | None:
        self._forget_old()
        run = self._running.get(request.request_id) or self._kept.get(request.request_id)
        if run is not None and run.request.digest != request.digest:
            raise Conflict("this idempotency key belongs to another request; send this one with a key of its own")
        return run

    def _start(self, request: GenerationRequest) -> _Run:
        if len(self._running) >= self._max_running:
            raise Saturated(f"{len(self._running)} requests with idempotency keys run, as many as are allowed")
        run = self._running[request.request_id] = _Run(request)
        run.task = asyncio.create_task(self._read(run), name=f"generate {request.request_id}")
        run.task.add_done_callback(lambda _: self._end(run))
        return run

    async def _read(self, run: _Run) -> None:
        limit = asyncio.timeout(None if run.request.timeout_s is None else run.request.timeout_s + _LATE_S)
        try:
            async with limit:
                await self._read_all(run)
        except asyncio.CancelledError:
            run.add(self._ended(run, FinishReason.CANCELLED, "the request was cancelled"))
        except TimeoutError as error:
            if limit.expired():
                run.add(self._ended(run, FinishReason.EXPIRED, None))
            else:
                run.error = error
        except Exception as error:
            run.error = error

    async def _read_all(self, run: _Run) -> None:
        events: Any = self._generator.generate(run.request)
        if not hasattr(events, "aclose"):
            events = _closable(events)
        async with aclosing(events):
            async for event in events:
                run.add(event)
                if isinstance(event, Finished):
                    return
        run.error = GreenroomError("the generation ended without an outcome")

    @staticmethod
    def _ended(run: _Run, reason: FinishReason, message: str | None) -> Finished:
        return Finished(reason, len(run.request.prompt_ids), len(run.events), message)

    def _end(self, run: _Run) -> None:
        request_id = run.request.request_id
        del self._running[request_id]
        last = run.events[-1] if run.events else None
        if run.error is None and not isinstance(last, Finished):  # cancelled before its first step
            run.add(self._ended(run, FinishReason.CANCELLED, "the request was cancelled"))
        if isinstance(last, Finished) and last.reason in (FinishReason.STOP, FinishReason.LENGTH):
            run.ended_at = self._clock()
            self._kept[request_id] = run
            self._kept_weight += run.weight
        run.wake()
        self._forget_old()

    def _forget_old(self) -> None:
        """Those whose time is over; and the oldest, while there is too much."""
        before = self._clock() - self._keep_s
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._kept_weight <= MAX_KEPT_TOKENS and oldest.ended_at is not None and oldest.ended_at > before:
                return
            self._kept.popitem(last=False)
            self._kept_weight -= oldest.weight


async def _closable(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    async for event in events:
        yield event
