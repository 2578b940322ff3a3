"""What every call goes through, over HTTP or gRPC: limits, body, generations, deadline, cancel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from greenroom.core.collaboration import CollaborationCard
from greenroom.core.errors import Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import FinishReason, ServedModel
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.admission import Admission
from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.held_bytes import CallBytes, HeldBytes
from greenroom.gateway.doors.limits import Limits, Refusal
from greenroom.gateway.errors import (
    ApiError,
    expired,
    model_not_found,
    takes_inferences,
    takes_prompts,
    too_many,
    unavailable,
)
from greenroom.gateway.metrics import GatewayMetrics, SequenceMeter
from greenroom.gateway.pipeline.in_flight import InFlightRequest
from greenroom.gateway.replies.choices import ChoiceAssembler, Delta, GenerationFailed
from greenroom.gateway.replies.inference_results import InferenceAssembler, InferenceJob
from greenroom.gateway.requests.call_headers import CallHeaders, owned_id
from greenroom.gateway.requests.generations import CLOSE_TIMEOUT_S, AnyJob, Assembler, Generations, JobGenerator
from greenroom.gateway.requests.inferences.prepare_inferences import PreparedInferences
from greenroom.gateway.requests.prepare import Prepared
from greenroom.text import TextProcessor
from greenroom.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults

_INLINE_BYTES = 16 * 1024
"""Bodies up to this size are tokenised on the event loop. It takes about a millisecond, less than a thread's trip."""


class RequestGenerator(JobGenerator, Protocol):
    """A Generator whose requests with an idempotency key outlive their clients, and can be ended by their id."""

    def keyed_request(self, request_id: str) -> InFlightRequest | None:
        """The request with an idempotency key that runs here under that id."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a request, whichever gateway took it. Nothing happens where it has ended, or was never known. Raises
        ApiError (503)."""
        ...


P = TypeVar("P", Prepared, PreparedInferences)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ActiveCall(Generic[P]):
    """One call while it is answered. ``deadline`` is monotonic."""

    prepared: P
    generations: Generations
    deadline: float

    async def parts(self, quiet_s: float) -> list[Delta]:
        """The next parts. Empty after ``quiet_s`` of silence. Raises ApiError (504) at the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise expired(f"the request was not finished within {self.prepared.timeout_s:g} seconds")
        return await self.generations.parts(min(left, quiet_s))


class RequestHandler:
    """Answers calls from ``generator``. ``tasks`` holds every task that it starts. Raises CorruptCheckpoint where the
    checkpoint's sampling defaults can not be read."""

    def __init__(
        self,
        config: GatewayConfig,
        generator: RequestGenerator,
        text: TextProcessor | None,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self.config = config
        self._text = text
        reads = text is not None and config.generation_config == "auto"
        self.defaults: SamplingDefaults = text.sampling_defaults() if reads and text is not None else NO_DEFAULTS
        """Of sampling, for requests that do not say."""
        self._metrics = metrics
        self._admission = admission
        self._generator = generator
        self._limits = Limits(config.cancels_per_minute)
        self._active: dict[str, set[Generations]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._held = HeldBytes(config.max_inputs_held_bytes)
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def text(self) -> TextProcessor:
        """Of the model that generates text. Raises ApiError (503) where this gateway has none."""
        if self._text is None:
            raise unavailable(
                "the tokenizer of this model is not here; start the gateway with its --model", "not_ready"
            )
        return self._text

    @property
    def has_chat(self) -> bool:
        return self._text is not None and self._text.has_chat

    @property
    def model(self) -> ServedModel:
        return self._generator.model

    def model_named(self, name: str) -> ServedModel:
        """Raises ApiError (404)."""
        model = self.model
        if name != model.name:
            raise model_not_found(name, model.name)
        return model

    def text_model_named(self, name: str) -> ServedModel:
        """Raises ApiError (404), InvalidRequest for a collaboration of experts."""
        model = self.model_named(name)
        if model.collaboration is not None:
            raise takes_inferences(model.name)
        return model

    def collaboration_named(self, name: str) -> tuple[ServedModel, CollaborationCard]:
        """Raises ApiError (404), InvalidRequest for a model of text."""
        model = self.model_named(name)
        if model.collaboration is None:
            raise takes_prompts(model.name)
        return model, model.collaboration

    @property
    def unready(self) -> str | None:
        """Why no requests are taken now, None where they are."""
        return self._admission.unready

    def check_ready(self) -> None:
        """Raises ApiError (503) where no requests are taken now."""
        self._admission.check_ready()

    @contextmanager
    def hold_bytes(self) -> Iterator[CallBytes]:
        """What is added to it is held while the context is open, and by ``infer`` also until what goes on has ended."""
        held = self._held.of_call()
        try:
            yield held
        finally:
            held.release()

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
            if running is not None and not running.place_kept:
                running.place_kept = True
                self._limits.hold(name, base)
                running.at_end.append(lambda: self._limits.leave(name, base))

    def _keep_bytes(self, prepared: PreparedInferences, held: CallBytes) -> None:
        """Inputs of requests that go on without their client go on counting. Of its callers one counts for that."""
        for job in prepared.jobs:
            running = self._generator.keyed_request(job.request.request_id)
            if running is not None and running.digest == job.request.digest and not running.bytes_kept:
                running.bytes_kept = True
                running.at_end.append(held.part(sum(len(one.data) for one in job.request.inputs)).release)

    async def prepare(self, size: int, work: Callable[[], T]) -> T:
        """Runs ``work`` and returns its result. A body of more than a few kB (``size``, in bytes) is prepared in a
        thread, so that it does not hold up the event loop."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @asynccontextmanager
    async def run(
        self, prepared: P, call: CallHeaders, arrived: float, *, tokens: bool = False
    ) -> AsyncIterator[ActiveCall[P]]:
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

    async def infer(
        self, prepared: PreparedInferences, call: CallHeaders, arrived: float, held: CallBytes
    ) -> list[InferenceOutputs]:
        """What was found for each element of the batch, in its order. ``held``: by the call; what goes on without it
        keeps its part of that. Raises what ``run`` and its parts raise: the first failure is the call's, and ends the
        others."""
        found: dict[int, InferenceOutputs] = {}
        try:
            async with self.run(prepared, call, arrived) as running:
                while not running.generations.done:
                    for part in await running.parts(self.config.keep_alive_s):
                        assert part.outputs is not None, "an inference has one part"
                        found[part.index] = part.outputs
        finally:
            if call.keyed:
                self._keep_bytes(prepared, held)
        return [found[job.index] for job in prepared.jobs]

    def _generations(self, prepared: Prepared | PreparedInferences, arrived: float, tokens: bool) -> Generations:
        model = self.model
        metrics = self._metrics.of(model.name)

        def assembler(job: AnyJob) -> Assembler:
            if isinstance(job, InferenceJob):
                return InferenceAssembler(job)
            return ChoiceAssembler(job, self.text.tokenizer, model.eos_token_ids, tokens=tokens)

        jobs = [(job, assembler(job)) for job in prepared.jobs]

        def meter(job: AnyJob) -> SequenceMeter:
            prompt_tokens = 0 if isinstance(job, InferenceJob) else len(job.request.prompt_ids)
            return SequenceMeter(metrics, prompt_tokens, arrived)

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
