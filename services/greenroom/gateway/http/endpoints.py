"""The endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from aiohttp import web

from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.errors import ClientGone, as_api_error, defect
from greenroom.gateway.http.http_exchange import note_of, read_json
from greenroom.gateway.http.sse import DONE, EventStream, error_frame, frame
from greenroom.gateway.replies.choices import Delta, TokenRecord
from greenroom.gateway.replies.chunks import ChatStyle, ChoiceResult, CompletionStyle, Head, ReplyStyle, Tally
from greenroom.gateway.requests.bodies import Body, ChatBody, CompletionBody, decode_body, hints_in
from greenroom.gateway.requests.call_headers import terms_of
from greenroom.gateway.requests.calls import Calls, Running
from greenroom.gateway.requests.prepare import Prepared, prepare_chat, prepare_completion

CALLER = web.RequestKey("caller", Caller)


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[Body]):
    body: type[Body]
    prepare: Callable[..., Prepared]
    style: Callable[..., ReplyStyle]
    id_prefix: str


_CHAT = _Endpoint(ChatBody, prepare_chat, ChatStyle, "chatcmpl")
_COMPLETION = _Endpoint(CompletionBody, prepare_completion, CompletionStyle, "cmpl")


class Api:
    """Over HTTP, in OpenAI's words. ``fingerprint``: of a model by its name, for the replies."""

    def __init__(self, calls: Calls, fingerprint: Callable[[str], str]) -> None:
        self._calls = calls
        self._config = calls.config
        self._fingerprint = fingerprint

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _COMPLETION)

    async def _answer(self, request: web.Request, endpoint: _Endpoint[Any]) -> web.StreamResponse:
        arrived = time.monotonic()
        terms = terms_of(lambda name: request.headers.getall(name, ()), request[CALLER])
        note = note_of(request)
        note.base = terms.base
        with self._calls.enter(terms):
            raw = await read_json(request, self._config)

            def prepare() -> Prepared:
                body = decode_body(raw, endpoint.body)
                note.user, note.hints = body.user or body.safety_identifier, hints_in(body)
                model = self._calls.model_named(body.model)
                prepared: Prepared = endpoint.prepare(body, self._calls.text, model, terms=terms, config=self._config)
                return prepared

            prepared = await self._calls.prepare(len(raw), prepare)
            name = self._calls.model.name
            head = Head(f"{endpoint.id_prefix}-{terms.base}", int(time.time()), name, self._fingerprint(name))
            style = endpoint.style(
                head,
                self._calls.text.tokenizer,
                usage=prepared.usage,
                prompts=[len(job.request.prompt_ids) for job in prepared.jobs],
                logprobs=prepared.jobs[0].request.sampling.logprobs is not None,
            )
            async with self._calls.run(prepared, terms, arrived) as running:
                if prepared.stream:
                    return await self._stream(request, running, style)
                return await self._whole(running, style)

    async def _whole(self, running: Running, style: ReplyStyle) -> web.Response:
        jobs = running.prepared.jobs
        texts: list[list[str]] = [[] for _ in jobs]
        records: list[list[TokenRecord]] = [[] for _ in jobs]
        ends: dict[int, Delta] = {}
        while not running.generations.done:
            for part in await running.parts(self._config.keep_alive_s):
                texts[part.index].append(part.text)
                records[part.index].extend(part.records)
                if part.finish is not None:
                    ends[part.index] = part
        results = [
            ChoiceResult(index, "".join(texts[index]), records[index], end.finish)
            for index, end in sorted(ends.items())
            if end.finish is not None
        ]
        tally = _tally(running.prepared)
        for end in ends.values():
            tally.add(end)
        body = msgspec.json.encode(style.whole(results, tally))
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, running: Running, style: ReplyStyle) -> web.StreamResponse:
        """Headers go out with the first parts, so what is refused before them has a status of its own; or with the
        first keep-alive. A choice is opened with its first part: clients take what opens it for its first token."""
        parts = await running.parts(self._config.keep_alive_s)
        stream = EventStream(request, self._config.slow_client_timeout_s)
        await stream.open()
        unopened = {job.index for job in running.prepared.jobs}
        tally = _tally(running.prepared)
        try:
            while True:
                if parts:
                    await stream.send(b"".join(self._frames(style, part, unopened) for part in parts))
                    for part in parts:
                        if part.finish is not None:
                            tally.add(part)
                else:
                    await stream.keep_alive()
                if running.generations.done:
                    break
                parts = await running.parts(self._config.keep_alive_s)
            last = frame(style.usage(tally)) if running.prepared.usage.at_end else b""
            await stream.send(last + DONE)
        except ClientGone:
            raise
        except Exception as error:
            shaped = as_api_error(error) or defect()
            note_of(request).failed(shaped)
            await stream.send(error_frame(shaped))
        await stream.close()
        note_of(request).sent = stream.response.status
        return stream.response

    @staticmethod
    def _frames(style: ReplyStyle, part: Delta, unopened: set[int]) -> bytes:
        opening = None
        if part.index in unopened:
            unopened.remove(part.index)
            opening = style.opening(part.index)
        frames = b"" if opening is None else frame(opening)
        if part.text or part.records:
            frames += frame(style.part(part))
        return frames if part.finish is None else frames + frame(style.closing(part))


def _tally(prepared: Prepared) -> Tally:
    return Tally(prepared.prompt_tokens, [len(job.request.prompt_ids) for job in prepared.jobs])
