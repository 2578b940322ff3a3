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
from greenroom.gateway.http.bodies import read_json
from greenroom.gateway.http.middleware import note_of
from greenroom.gateway.http.sse import DONE, EventStream, error_frame, frame
from greenroom.gateway.replies.choices import Delta
from greenroom.gateway.replies.reply_writers import ChatWriter, ChoiceResult, CompletionWriter, Head, ReplyWriter, Tally
from greenroom.gateway.replies.token_records import TokenRecord
from greenroom.gateway.requests.bodies import Body, ChatBody, CompletionBody, decode_body, hints_in
from greenroom.gateway.requests.call_headers import call_headers
from greenroom.gateway.requests.prepare import Prepared, prepare_chat, prepare_completion
from greenroom.gateway.requests.request_handler import ActiveCall, RequestHandler

CALLER = web.RequestKey("caller", Caller)


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[Body]):
    body: type[Body]
    prepare: Callable[..., Prepared]
    writer: Callable[..., ReplyWriter]
    id_prefix: str


_CHAT = _Endpoint(ChatBody, prepare_chat, ChatWriter, "chatcmpl")
_COMPLETION = _Endpoint(CompletionBody, prepare_completion, CompletionWriter, "cmpl")


class Api:
    """OpenAI's endpoints that generate. ``fingerprint``: from a model's name to the replies' system_fingerprint."""

    def __init__(self, requests: RequestHandler, fingerprint: Callable[[str], str]) -> None:
        self._requests = requests
        self._config = requests.config
        self._fingerprint = fingerprint

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _COMPLETION)

    async def _answer(self, request: web.Request, endpoint: _Endpoint[Any]) -> web.StreamResponse:
        arrived = time.monotonic()
        call = call_headers(lambda name: request.headers.getall(name, ()), request[CALLER])
        note = note_of(request)
        note.base = call.base
        with self._requests.enter(call):
            raw = await read_json(request, self._config)

            def prepare() -> Prepared:
                body = decode_body(raw, endpoint.body)
                note.user, note.hints = body.user or body.safety_identifier, hints_in(body)
                model = self._requests.text_model_named(body.model)
                prepared: Prepared = endpoint.prepare(
                    body,
                    self._requests.text,
                    model,
                    call=call,
                    config=self._config,
                    defaults=self._requests.defaults,
                )
                return prepared

            prepared = await self._requests.prepare(len(raw), prepare)
            name = self._requests.model.name
            head = Head(f"{endpoint.id_prefix}-{call.base}", int(time.time()), name, self._fingerprint(name))
            writer = endpoint.writer(
                head,
                self._requests.text.tokenizer,
                usage=prepared.usage,
                prompts=[len(job.request.prompt_ids) for job in prepared.jobs],
                logprobs=prepared.jobs[0].request.sampling.logprobs is not None,
            )
            async with self._requests.run(prepared, call, arrived) as running:
                if prepared.stream:
                    return await self._stream(request, running, writer)
                return await self._whole(running, writer)

    async def _whole(self, running: ActiveCall[Prepared], writer: ReplyWriter) -> web.Response:
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
        body = msgspec.json.encode(writer.whole(results, tally))
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, running: ActiveCall[Prepared], writer: ReplyWriter
    ) -> web.StreamResponse:
        """The headers go out with the first parts or the first keep-alive, so that a refusal before them has a status
        of its own. A choice is opened with its first part, since clients take the opening for its first token."""
        parts = await running.parts(self._config.keep_alive_s)
        stream = EventStream(request, self._config.slow_client_timeout_s)
        await stream.open()
        unopened = {job.index for job in running.prepared.jobs}
        tally = _tally(running.prepared)
        try:
            while True:
                if parts:
                    await stream.send(b"".join(self._frames(writer, part, unopened) for part in parts))
                    for part in parts:
                        if part.finish is not None:
                            tally.add(part)
                else:
                    await stream.keep_alive()
                if running.generations.done:
                    break
                parts = await running.parts(self._config.keep_alive_s)
            last = frame(writer.usage(tally)) if running.prepared.usage.at_end else b""
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
    def _frames(writer: ReplyWriter, part: Delta, unopened: set[int]) -> bytes:
        opening = None
        if part.index in unopened:
            unopened.remove(part.index)
            opening = writer.opening(part.index)
        frames = b"" if opening is None else frame(opening)
        if part.text or part.records:
            frames += frame(writer.part(part))
        return frames if part.finish is None else frames + frame(writer.closing(part))


def _tally(prepared: Prepared) -> Tally:
    return Tally(prepared.prompt_tokens, [len(job.request.prompt_ids) for job in prepared.jobs])
