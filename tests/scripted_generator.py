"""A Generator without a model: real tokens of a real tokenizer, under the control of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from greenroom.core.generation import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    ServedModel,
    Token,
    TokenLogprobs,
)
from greenroom.core.inference import InferenceRequest
from greenroom.text import StopChecker, Tokenizer
from tests.waiting import DEADLINE_S as DEADLINE_S

TEXT = "Hello there, the quick brown fox! 日本語 naïve café 🚀 ありがとう. STOP here, then stop again; the end."


class ScriptedGenerator:
    """Says ``TEXT`` (the choice of a seed begins at another word), then EOS.

    A request gives its i-th token once ``allow`` has let more than i through; at first everything passes.
    """

    def __init__(self, tokenizer: Tokenizer, *, name: str = "org/small", max_model_len: int = 256) -> None:
        eos = tokenizer.token_id("<|im_end|>")
        assert eos is not None
        self.tokenizer = tokenizer
        self.model = ServedModel(name, max_model_len, tokenizer.vocab_size, (eos,), created=1_700_000_000)
        self.ready = True
        self.seen: list[GenerationRequest] = []
        self.active: dict[str, GenerationRequest] = {}
        self.closed: list[str] = []
        self.outcomes: dict[str, FinishReason] = {}
        self.refusal: Exception | None = None
        self.refuse_from: int | None = None
        self.on_refusal: Callable[[], object] = lambda: None
        self.fail_at: int | None = None
        self.at_fault = False
        self.raise_at: int | None = None
        self.cancel_at: int | None = None
        self.vanish_at: int | None = None
        self.checks_stops = True
        self.gives_logprobs = True
        self.approximates: Callable[[GenerationRequest], float] = lambda _: 0.0
        self.says: Callable[[GenerationRequest], Sequence[int]] = self._text_of
        self._allowed: int | None = None
        self._changed = asyncio.Condition()

    async def allow(self, tokens: int | None) -> None:
        """Lets every request come to ``tokens`` tokens, None: to its end."""
        async with self._changed:
            self._allowed = tokens
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds; it may depend on what requests do here."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(condition)

    async def until_active(self, count: int) -> None:
        await self.until(lambda: len(self.active) == count)

    async def until_idle(self) -> None:
        await self.until_active(0)

    def _text_of(self, request: GenerationRequest) -> list[int]:
        words = TEXT.split(" ")
        first = (request.sampling.seed or 0) % len(words)
        return self.tokenizer.encode(" ".join(words[first:] + words[:first]), add_special_tokens=False)

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        raise AssertionError("this generator's model is of text")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        number = len(self.seen)
        self.seen.append(request)
        if self.refusal is not None and (self.refuse_from is None or number >= self.refuse_from):
            self.on_refusal()
            raise self.refusal
        await self._note(lambda: self.active.__setitem__(request.request_id, request))
        reason = FinishReason.CANCELLED
        try:
            async for event in self._events(request):
                if isinstance(event, Finished):
                    reason = event.reason
                yield event
        finally:
            # what a cancelled task awaits here must not be lost: it is what tests wait for
            self.active.pop(request.request_id)
            self.closed.append(request.request_id)
            self.outcomes[request.request_id] = reason
            await asyncio.shield(asyncio.ensure_future(self._note(lambda: None)))

    def keyed_request(self, request_id: str) -> None:
        """None: here a request with a key ends with its client, as any other."""

    async def cancel(self, request_id: str) -> None:
        """Nothing runs here without a client."""

    async def _note(self, change: Callable[[], object]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def _events(self, request: GenerationRequest) -> AsyncIterator[Event]:
        sampling = request.sampling
        limit = self.model.max_model_len if sampling.max_tokens is None else sampling.max_tokens
        ids = [*self.says(request), *(self.model.eos_token_ids if not sampling.ignore_eos else ())]
        stops = StopChecker(self.tokenizer, sampling.stop if self.checks_stops else (), sampling.min_tokens)
        ends = {*sampling.stop_token_ids, *(self.model.eos_token_ids if not sampling.ignore_eos else ())}
        index = 0
        reason, error = FinishReason.LENGTH, None
        while index < limit:
            async with self._changed:
                await self._changed.wait_for(partial(self._may_give, index))
            if index == self.raise_at:
                raise RuntimeError("a defect of the engine")
            if index == self.vanish_at:
                return
            if index in (self.fail_at, self.cancel_at):
                failed = index == self.fail_at
                reason = FinishReason.FAILED if failed else FinishReason.CANCELLED
                error = "an expert could not be read" if failed else None
                break
            token_id = ids[index % len(ids)]
            yield Token(index, token_id, self._logprobs(request, token_id, index))
            index += 1
            if token_id in ends or stops.push(token_id):
                reason = FinishReason.STOP
                break
        yield Finished(
            reason,
            len(request.prompt_ids),
            index,
            error,
            approximated=self.approximates(request),
            invalid=self.at_fault,
            prompt_logprobs=None if reason not in (FinishReason.STOP, FinishReason.LENGTH) else self._scores(request),
        )

    def _scores(self, request: GenerationRequest) -> tuple[TokenLogprobs, ...] | None:
        """The n-th token of the prompt has the log-probability -n / 8."""
        count = request.sampling.prompt_logprobs
        if count is None or not self.gives_logprobs:
            return None
        return tuple(
            TokenLogprobs(-place / 8, tuple((token_id, -place / 8) for _ in range(min(count, 1))))
            for place, token_id in enumerate(request.prompt_ids)
            if place
        )

    def _may_give(self, index: int) -> bool:
        return self._allowed is None or index < self._allowed

    def _logprobs(self, request: GenerationRequest, token_id: int, index: int) -> TokenLogprobs | None:
        count = request.sampling.logprobs
        if count is None or not self.gives_logprobs:
            return None
        others = [(token_id + step) % self.model.vocab_size for step in range(count)]
        return TokenLogprobs(-0.25 - index, tuple((other, -0.25 - index - step) for step, other in enumerate(others)))
