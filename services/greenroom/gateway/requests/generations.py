"""The generations of one call, side by side, merged into one stream of parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from greenroom.core.errors import Conflict, InvalidRequest, Saturated
from greenroom.core.generation import Event, FinishReason, Generator, Token
from greenroom.core.inference import InferenceRequest
from greenroom.gateway.errors import ApiError
from greenroom.gateway.metrics import SequenceMeter
from greenroom.gateway.replies.choices import Delta, GenerationFailed, Job
from greenroom.gateway.replies.inference_results import InferenceJob

_LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
AnyJob = Job | InferenceJob


class JobGenerator(Generator, Protocol):
    """Answers sequences, and inferences where its model is a collaboration of experts."""

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """As ``generate``: one Finished, with the outputs."""
        ...


class Assembler(Protocol):
    """From the events of one job to the parts of the reply."""

    @property
    def finish(self) -> FinishReason | None: ...

    def push(self, event: Event) -> Delta | None: ...


class Generations:
    """One task a sequence moves its parts into a bounded buffer. Leaving the context cancels the tasks that still run
    and waits until every generator is closed.

    ``tasks``: where the running tasks are kept, so that stopping the server can wait for them.
    """

    def __init__(
        self,
        generator: JobGenerator,
        jobs: Sequence[tuple[AnyJob, Assembler]],
        *,
        meter: Callable[[AnyJob], SequenceMeter],
        buffer: int,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._generator = generator
        self._jobs = jobs
        self._meter = meter
        self._buffer: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(buffer)
        self._alarm = _Alarm(self._break_silence)
        self._all_tasks = tasks
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(jobs)

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return self._left == 0

    async def __aenter__(self) -> Self:
        for job, assembler in self._jobs:
            task = asyncio.create_task(self._pump(job, assembler), name=f"generate {job.request.request_id}")
            self._tasks.append(task)
            self._all_tasks.add(task)
            task.add_done_callback(self._all_tasks.discard)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        self._cancel()
        if self._tasks:
            _, running = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
            for task in running:
                _LOG.error("%s did not close within %g seconds", task.get_name(), CLOSE_TIMEOUT_S)

    async def parts(self, timeout_s: float) -> list[Delta]:
        """All parts that have come, in order. Empty if none comes within ``timeout_s``.

        Raises the first failure: InvalidRequest, Saturated, Conflict, ApiError, GenerationFailed, or the error given to
        ``abort``.
        """
        self._alarm.set(timeout_s)
        item = await self._buffer.get()
        parts: list[Delta] = []
        while True:
            if isinstance(item, Exception):
                raise item
            if item is not None:
                parts.append(item)
                self._left -= item.finish is not None
            if self._buffer.empty():
                return parts
            item = self._buffer.get_nowait()

    def _break_silence(self) -> None:
        """Wakes the reader if it waits. If something has come, the reader is awake or does not read now."""
        if self._buffer.empty():
            self._buffer.put_nowait(None)

    def abort(self, error: Exception) -> None:
        """Ends all generations. The next ``parts`` raises ``error``."""
        self._cancel()
        while not self._buffer.empty():
            self._buffer.get_nowait()
        self._buffer.put_nowait(error)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _pump(self, job: AnyJob, assembler: Assembler) -> None:
        """Once the last part can be read, the generator is closed and the sequence counted. A sequence with an
        idempotency key goes on without its client, so it is not counted as ended when the client leaves."""
        meter = self._meter(job)
        outcome: FinishReason | None = None if job.request.keyed else FinishReason.CANCELLED
        try:
            last: Delta | Exception = await self._run(job, assembler, meter)
            outcome = assembler.finish
        except (ApiError, Conflict, InvalidRequest, Saturated) as refusal:
            outcome, last = None, refusal
        except GenerationFailed as error:
            outcome, last = error.reason, error
        except Exception as error:
            _LOG.exception("%s failed", job.request.request_id)
            outcome, last = FinishReason.FAILED, error
        finally:
            meter.end(outcome)
        await self._buffer.put(last)

    async def _run(self, job: AnyJob, assembler: Assembler, meter: SequenceMeter) -> Delta:
        """Buffers all parts but the last, and returns that one. Raises what the generator raises, GenerationFailed."""
        events = (
            self._generator.infer(job.request)
            if isinstance(job, InferenceJob)
            else self._generator.generate(job.request)
        )
        try:
            async for event in events:
                if isinstance(event, Token):
                    meter.token()
                else:
                    meter.finished(event)
                part = assembler.push(event)
                if part is not None and part.finish is not None:
                    return part
                if part is not None:
                    await self._buffer.put(part)
        finally:
            await _close(events)
        raise GenerationFailed("the generation ended without an outcome", FinishReason.FAILED)


class _Alarm:
    """Calls ``ring`` once no ``set`` has been made for the time that the last one gave.

    There is a ``set`` for every token, so it must be cheap: the timer stays where it is and looks again when it fires.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._at = loop.time() + after_s
        if self._timer is not None and self._timer.when() > self._at:
            self.cancel()
        if self._timer is None:
            self._timer = loop.call_at(self._at, self._look)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if loop.time() < self._at:
            self._timer = loop.call_at(self._at, self._look)
        else:
            self._ring()


async def _close(events: AsyncIterator[Event]) -> None:
    """Tells the generator that its events are not wanted any more. Without ``aclose`` there is nothing to end."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
