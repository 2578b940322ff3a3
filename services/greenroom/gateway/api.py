"""The endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from aiohttp import web

from greenroom.core.errors import GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import Generator
from greenroom.gateway.admission import Admission
from greenroom.gateway.choices import ChoiceAssembler, Delta, Job, TokenRecord
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.errors import (
    ApiError,
    ClientGone,
    as_api_error,
    defect,
    expired,
    model_not_found,
    unavailable,
)
from greenroom.gateway.exchange import note_of, read_json
from greenroom.gateway.generations import CLOSE_TIMEOUT_S, Generations
from greenroom.gateway.metrics import GatewayMetrics, SequenceMeter
from greenroom.gateway.prepare import Prepared, prepare_chat, prepare_completion
from greenroom.gateway.replies import ChatStyle, ChoiceResult, CompletionStyle, Head, ReplyStyle, usage_of
from greenroom.gateway.schema import Body, ChatBody, CompletionBody, decode_body
from greenroom.gateway.sse import DONE, EventStream, error_frame, frame
from greenroom.text import TextProcessor

_INLINE_BYTES = 16 * 1024
"""Bodies up to this are tokenised on the event loop: about a millisecond, and less than a thread's round trip."""


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[Body]):
    body: type[Body]
    prepare: Callable[..., Prepared]
    style: Callable[..., ReplyStyle]
    id_prefix: str


_CHAT = _Endpoint(ChatBody, prepare_chat, ChatStyle, "chatcmpl")
_COMPLETION = _Endpoint(CompletionBody, prepare_completion, CompletionStyle, "cmpl")


@dataclass(frozen=True, slots=True)
class _Running:
    """One request while it is answered. ``deadline`` is monotonic."""

    prepared: Prepared
    generations: Generations
    style: ReplyStyle
    deadline: float


class Api:
    """Answers requests from ``generator``; holds every task it starts in ``tasks``."""

    def __init__(
        self,
        config: GatewayConfig,
        generator: Generator,
        text: TextProcessor,
        metrics: GatewayMetrics,
        admission: Admission,
        fingerprint: str,
    ) -> None:
        self._config = config
        self._generator = generator
        self._text = text
        self._metrics = metrics
        self._admission = admission
        self._fingerprint = fingerprint
        self._active: set[Generations] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self.tasks: set[asyncio.Task[None]] = set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _COMPLETION)

    def abort(self) -> None:
        """Ends every running generation; its client is told that the server stops."""
        for generations in self._active:
            generations.abort(unavailable("the server is stopping and ended this request", "cancelled"))

    async def close(self) -> None:
        """Joins what is left, once no request is answered any more."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: web.Request, endpoint: _Endpoint[Any]) -> web.StreamResponse:
        arrived = time.monotonic()
        with self._admission.enter():
            raw = await read_json(request, self._config)
            reply_id = f"{endpoint.id_prefix}-{uuid.uuid4().hex}"
            body, prepared = await self._prepare(raw, endpoint, reply_id)
            note_of(request).user = body.user or body.safety_identifier
            model = self._generator.model
            head = Head(reply_id, int(time.time()), model.name, self._fingerprint)
            style = endpoint.style(
                head,
                self._text.tokenizer,
                include_usage=prepared.include_usage,
                logprobs=prepared.jobs[0].request.sampling.logprobs is not None,
            )
            async with self._generations(prepared, arrived) as generations:
                self._active.add(generations)
                try:
                    running = _Running(prepared, generations, style, arrived + self._config.request_timeout_s)
                    return await (self._stream(request, running) if prepared.stream else self._whole(running))
                except (ApiError, InvalidRequest, Saturated):
                    raise
                except GreenroomError as error:
                    if self._generator.ready:
                        raise
                    raise unavailable(str(error), "not_ready") from error
                finally:
                    self._active.discard(generations)

    async def _prepare(self, raw: bytes, endpoint: _Endpoint[Body], reply_id: str) -> tuple[Body, Prepared]:
        def prepare() -> tuple[Body, Prepared]:
            body = decode_body(raw, endpoint.body)
            model = self._generator.model
            if body.model != model.name:
                raise model_not_found(body.model, model.name)
            limit = self._config.max_choices
            return body, endpoint.prepare(body, self._text, model, reply_id=reply_id, max_choices=limit)

        if len(raw) <= _INLINE_BYTES:
            return prepare()
        return await asyncio.get_running_loop().run_in_executor(self._pool, prepare)

    def _generations(self, prepared: Prepared, arrived: float) -> Generations:
        eos = self._generator.model.eos_token_ids
        jobs = [(job, ChoiceAssembler(job, self._text.tokenizer, eos)) for job in prepared.jobs]

        def meter(job: Job) -> SequenceMeter:
            return SequenceMeter(self._metrics, len(job.request.prompt_ids), arrived)

        return Generations(self._generator, jobs, meter=meter, buffer=self._config.stream_buffer, tasks=self.tasks)

    async def _parts(self, running: _Running) -> list[Delta]:
        """The next parts; empty after ``keep_alive_s`` of silence. Raises ApiError (504) at the deadline."""
        left = running.deadline - time.monotonic()
        if left <= 0:
            raise expired(self._config.request_timeout_s)
        return await running.generations.parts(min(left, self._config.keep_alive_s))

    async def _whole(self, running: _Running) -> web.Response:
        jobs = running.prepared.jobs
        texts: list[list[str]] = [[] for _ in jobs]
        records: list[list[TokenRecord]] = [[] for _ in jobs]
        ends: dict[int, Delta] = {}
        while not running.generations.done:
            for part in await self._parts(running):
                texts[part.index].append(part.text)
                records[part.index].extend(part.records)
                if part.finish is not None:
                    ends[part.index] = part
        results = [
            ChoiceResult(index, "".join(texts[index]), records[index], end.finish)
            for index, end in sorted(ends.items())
            if end.finish is not None
        ]
        usage = usage_of(running.prepared.prompt_tokens, sum(end.generated for end in ends.values()))
        body = msgspec.json.encode(running.style.whole(results, usage))
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, running: _Running) -> web.StreamResponse:
        """Headers go out with the first parts, so what is refused before them has a status of its own; or with the
        first keep-alive."""
        parts = await self._parts(running)
        stream = EventStream(request, self._config.slow_client_timeout_s)
        await stream.open()
        openings = [running.style.opening(job.index) for job in running.prepared.jobs]
        generated = 0
        try:
            await stream.send(b"".join(frame(opening) for opening in openings if opening))
            while True:
                if parts:
                    await stream.send(b"".join(self._frames(running.style, part) for part in parts))
                    generated += sum(part.generated for part in parts)
                else:
                    await stream.keep_alive()
                if running.generations.done:
                    break
                parts = await self._parts(running)
            usage = usage_of(running.prepared.prompt_tokens, generated)
            last = frame(running.style.usage(usage)) if running.prepared.include_usage else b""
            await stream.send(last + DONE)
        except ClientGone:
            raise
        except Exception as error:
            shaped = as_api_error(error) or defect()
            note_of(request).code = shaped.code
            await stream.send(error_frame(shaped))
        await stream.close()
        return stream.response

    @staticmethod
    def _frames(style: ReplyStyle, part: Delta) -> bytes:
        text = frame(style.part(part)) if part.text or part.records else b""
        return text if part.finish is None else text + frame(style.closing(part))
