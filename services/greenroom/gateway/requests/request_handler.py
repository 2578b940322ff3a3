"""What every call goes through, over HTTP or gRPC: limits, body, generations, deadline, cancel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from greenroom.core.errors import Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import FinishReason, Generator, ServedModel
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.admission import Admission
from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.limits import Limits, Refusal
from greenroom.gateway.errors import ApiError, expired, model_not_found, too_many, unavailable
from greenroom.gateway.metrics import GatewayMetrics, SequenceMeter
from greenroom.gateway.pipeline.in_flight import InFlightRequest
from greenroom.gateway.replies.choices import ChoiceAssembler, Delta, GenerationFailed, Job
from greenroom.gateway.requests.call_headers import CallHeaders, owned_id
from greenroom.gateway.requests.generations import CLOSE_TIMEOUT_S, Generations
from greenroom.gateway.requests.prepare import Prepared
from greenroom.text import TextProcessor

_INLINE_BYTES = 16 * 1024
"""Bodies up to this size are tokenised on the event loop. It takes about a millisecond, less than a thread's trip."""


class RequestGenerator(Generator, Protocol):
    """A Generator whose requests with an idempotency key outlive their clients, and can be ended by their id."""

    def keyed_request(self, request_id: str) -> InFlightRequest | None:
        """The request with an idempotency key that runs here under that id."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a request, whichever gateway took it. Nothing happens where it has ended, or was never known. Raises
        ApiError (503)."""
        ...


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """One call while it is answered. ``deadline`` is monotonic."""

    prepared: Prepared
    generations: Generations
    deadline: float

    async def parts(self, quiet_s: float) -> list[Delta]:
        """The next parts. Empty after ``quiet_s`` of silence. Raises ApiError (504) at the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise expired(f"the request was not finished within {self.prepared.timeout_s:g} seconds")
        return await self.generations.parts(min(left, quiet_s))


class RequestHandler:
    """Answers calls from ``generator``. ``tasks`` holds every task that it starts."""

    def __init__(
        self,
        config: GatewayConfig,
        generator: RequestGenerator,
        text: TextProcessor,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self.config = config
        self.text = text
        self._metrics = metrics
        self._admission = admission
        self._generator = generator
        self._limits = Limits(config.cancels_per_minute)
        self._active: dict[str, set[Generations]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def model(self) -> ServedModel:
        return self._generator.model

    def model_named(self, name: str) -> ServedModel:
        """Raises ApiError (404)."""
        model = self.model
        if name != model.name:
            raise model_not_found(name, model.name)
        return model

    @contextmanager
    def enter(self, call: CallHeaders) -> Iterator[None]:
        """The call counts against the limits while the context is open; a request with an idempotency key counts until
        it has ended. It counts as one sequence until ``run``. Raises ApiError: 503 if not ready, 429 for the server's
        limits and the key's."""
        with self._admission.enter():
            refusal = self._limits.enter(call.caller, call.base, time.monotonic())
            _raise(refusal)
            try:
                yield
            finally:
                if call.keyed:
                    self._hold_place(call)
                self._limits.leave(call.caller.name, call.base)

    def _hold_place(self, call: CallHeaders) -> None:
        """A request that goes on without its client goes on counting. One hold is enough for all its callers."""
        name, base = call.caller.name, call.base
        for index in range(self.config.max_choices):
            running = self._generator.keyed_request(f"{base}-{index}")
            if running is not None and not running.at_end:
                self._limits.hold(name, base)
                running.at_end.append(lambda: self._limits.leave(name, base))

    async def prepare(self, size: int, work: Callable[[], Prepared]) -> Prepared:
        """Runs ``work`` and returns its result. A body of more than a few kB (``size``, in bytes) is prepared in a
        thread, so that it does not hold up the event loop."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @asynccontextmanager
    async def run(
        self, prepared: Prepared, call: CallHeaders, arrived: float, *, tokens: bool = False
    ) -> AsyncIterator[ActiveCall]:
        """Generates while the context is open. ``tokens``: the parts carry tokens too. Raises InvalidRequest or
        ApiError (429) where the key may not have so many sequences. An error inside the context becomes ApiError (503)
        where the generator has died."""
        _raise(self._limits.widen(call.caller, call.base, len(prepared.jobs), time.monotonic()))
        async with self._generations(prepared, arrived, tokens) as generations:
            active = self._active.setdefault(call.base, set())
            active.add(generations)
            try:
                yield ActiveCall(prepared, generations, arrived + prepared.timeout_s)
            except (ApiError, Conflict, InvalidRequest, Saturated):
                raise
            except GreenroomError as error:
                if self._generator.ready or isinstance(error, GenerationFailed):
                    raise
                raise unavailable(str(error), "not_ready") from error
            finally:
                active.discard(generations)
                if not active:
                    self._active.pop(call.base, None)

    def _generations(self, prepared: Prepared, arrived: float, tokens: bool) -> Generations:
        model = self.model
        metrics = self._metrics.of(model.name)
        jobs = [
            (job, ChoiceAssembler(job, self.text.tokenizer, model.eos_token_ids, tokens=tokens))
            for job in prepared.jobs
        ]

        def meter(job: Job) -> SequenceMeter:
            return SequenceMeter(metrics, len(job.request.prompt_ids), arrived)

        return Generations(self._generator, jobs, meter=meter, buffer=self.config.stream_buffer, tasks=self.tasks)

    async def cancel(self, given: str, caller: Caller) -> None:
        """Ends the caller's request. ``given``: the reply's id or a sequence's. Nothing happens where there is no such
        request. Raises ApiError (429) for too many cancels of requests that are not known here."""
        owned = owned_id(given, caller.name)
        if owned is None:
            return
        base, number = owned
        listening = bool(self._active.get(base))
        for generations in self._active.get(base, ()):
            generations.abort(GenerationFailed("the request was cancelled", FinishReason.CANCELLED))
        keyed = [self._generator.keyed_request(f"{base}-{n}") for n in range(self.config.max_choices)]
        running = [n for n, found in enumerate(keyed) if found is not None and not found.cancelled]
        if listening and not running:
            return  # A request without an idempotency key ends with its client's call.
        if not running:
            _raise(self._limits.cancel(caller, time.monotonic()))
        for n in running or [number]:
            await self._generator.cancel(f"{base}-{n}")

    def abort(self) -> None:
        """Ends every running generation. Its client is told that the server stops."""
        for active in self._active.values():
            for generations in active:
                generations.abort(unavailable("the server is stopping and ended this request", "cancelled"))

    async def close(self) -> None:
        """Waits for the tasks that are left. Call this once no call is answered any more."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _raise(refusal: Refusal | None) -> None:
    if refusal is None:
        return
    if refusal.retry_after_s is None:
        raise InvalidRequest(refusal.message, param="n", code=refusal.code)
    raise too_many(refusal.message, refusal.code, refusal.retry_after_s)
