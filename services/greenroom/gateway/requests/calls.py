"""What every call goes through, HTTP or RPC: who may come in, the body, the generations, the deadline, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from greenroom.core.errors import Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import FinishReason, Generator, ServedModel
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.admission import Admission
from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.limits import Limits, Refusal
from greenroom.gateway.errors import ApiError, expired, model_not_found, too_many, unavailable
from greenroom.gateway.metrics import GatewayMetrics, SequenceMeter
from greenroom.gateway.replies.choices import ChoiceAssembler, Delta, GenerationFailed, Job
from greenroom.gateway.requests.call_headers import Terms, owned_id
from greenroom.gateway.requests.generations import CLOSE_TIMEOUT_S, Generations
from greenroom.gateway.requests.idempotent_runs import Attached
from greenroom.gateway.requests.prepare import Prepared
from greenroom.text import TextProcessor

_INLINE_BYTES = 16 * 1024
"""Bodies up to this are tokenised on the event loop: about a millisecond, and less than a thread's round trip."""


@dataclass(frozen=True, slots=True)
class Running:
    """One call while it is answered. ``deadline`` is monotonic."""

    prepared: Prepared
    generations: Generations
    deadline: float

    async def parts(self, quiet_s: float) -> list[Delta]:
        """The next parts; empty after ``quiet_s`` of silence. Raises ApiError (504) at the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise expired(f"the request was not finished within {self.prepared.timeout_s:g} seconds")
        return await self.generations.parts(min(left, quiet_s))


class Calls:
    """Answers from ``generator``; holds every task it starts in ``tasks``."""

    def __init__(
        self,
        config: GatewayConfig,
        generator: Generator,
        text: TextProcessor,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self.config = config
        self.text = text
        self._metrics = metrics
        self._admission = admission
        self._generator = Attached(generator, max_running=config.max_in_flight, keep_s=config.keep_replies_s)
        self._limits = Limits(config.cancels_per_minute)
        self._active: dict[str, set[Generations]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def model(self) -> ServedModel:
        return self._generator.model

    @property
    def draining(self) -> bool:
        return self._admission.draining

    def model_named(self, name: str) -> ServedModel:
        """Raises ApiError (404)."""
        model = self.model
        if name != model.name:
            raise model_not_found(name, model.name)
        return model

    @contextmanager
    def enter(self, terms: Terms) -> Iterator[None]:
        """Counts as long as it is open, and a request with an idempotency key until it has ended; as one sequence
        until ``run``. Raises ApiError: 503 if not ready, 429 for the server's limits and the key's."""
        with self._admission.enter():
            refusal = self._limits.enter(terms.caller, terms.base, time.monotonic())
            _raise(refusal)
            try:
                yield
            finally:
                if terms.keyed:
                    self._hold_place(terms)
                self._limits.leave(terms.caller.name, terms.base)

    def _hold_place(self, terms: Terms) -> None:
        """What goes on without its client goes on counting."""
        name, base = terms.caller.name, terms.base
        for index in range(self.config.max_choices):
            task = self._generator.running(f"{base}-{index}")
            if task is not None:
                self._limits.hold(name, base)
                task.add_done_callback(lambda _: self._limits.leave(name, base))

    async def prepare(self, size: int, work: Callable[[], Prepared]) -> Prepared:
        """What ``work`` gives, done beside the event loop where a body of ``size`` bytes would hold it up."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @asynccontextmanager
    async def run(
        self, prepared: Prepared, terms: Terms, arrived: float, *, tokens: bool = False
    ) -> AsyncIterator[Running]:
        """Generates as long as it is open. ``tokens``: the parts carry tokens too. Raises InvalidRequest or ApiError
        (429) where the key may not have so many sequences; from whatever is done in it, ApiError (503) where the
        generator has died."""
        _raise(self._limits.widen(terms.caller, terms.base, len(prepared.jobs), time.monotonic()))
        async with self._generations(prepared, arrived, tokens) as generations:
            active = self._active.setdefault(terms.base, set())
            active.add(generations)
            try:
                yield Running(prepared, generations, arrived + prepared.timeout_s)
            except (ApiError, Conflict, InvalidRequest, Saturated):
                raise
            except GreenroomError as error:
                if self._generator.ready or isinstance(error, GenerationFailed):
                    raise
                raise unavailable(str(error), "not_ready") from error
            finally:
                active.discard(generations)
                if not active:
                    self._active.pop(terms.base, None)

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
        """End the caller's request of that id, whichever of its ids it is. Nothing happens where there is none. Raises
        ApiError (429) for too many that are not known here."""
        owned = owned_id(given, caller.name)
        if owned is None:
            return
        base, number = owned
        listening = bool(self._active.get(base))
        for generations in self._active.get(base, ()):
            generations.abort(GenerationFailed("the request was cancelled", FinishReason.CANCELLED))
        running = [n for n in range(self.config.max_choices) if self._generator.running(f"{base}-{n}")]
        if listening and not running:
            return  # without an idempotency key: it ends with its listener
        if not running:
            _raise(self._limits.cancel(caller, time.monotonic()))
        for n in running or [number]:
            await self._generator.cancel(f"{base}-{n}")

    def abort(self) -> None:
        """Ends every running generation; its client is told that the server stops."""
        for active in self._active.values():
            for generations in active:
                generations.abort(unavailable("the server is stopping and ended this request", "cancelled"))

    async def close(self) -> None:
        """Joins what is left, once no call is answered any more."""
        await self._generator.close()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _raise(refusal: Refusal | None) -> None:
    if refusal is None:
        return
    if refusal.retry_after_s is None:
        raise InvalidRequest(refusal.message, param="n", code=refusal.code)
    raise too_many(refusal.message, refusal.code, refusal.retry_after_s)
