"""/tokenize, /detokenize and /version, as vLLM has them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import msgspec
from aiohttp import web

from greenroom.core.generation import ServedModel
from greenroom.gateway.http.bodies import read_json
from greenroom.gateway.http.endpoints import CALLER
from greenroom.gateway.http.routes import Routes
from greenroom.gateway.replies.reply_bodies import Detokenized, Tokenized, Version
from greenroom.gateway.requests.call_headers import CallHeaders, base_id
from greenroom.gateway.requests.request_handler import RequestHandler
from greenroom.gateway.requests.token_bodies import detokenize_body, text_of, tokenize_body, tokens_of


class TokenApi:
    """They generate nothing. A call counts against the limits while it is answered, since a long text takes seconds."""

    def __init__(self, requests: RequestHandler) -> None:
        self._requests = requests

    def add_to(self, routes: Routes) -> None:
        routes.post("/tokenize", self.tokenize)
        routes.post("/detokenize", self.detokenize)
        routes.get("/version", self.version)

    async def tokenize(self, request: web.Request) -> web.Response:
        def work(raw: bytes) -> Tokenized:
            body = tokenize_body(raw)
            model, text = self._model(body.model), self._requests.text
            ids = tokens_of(body, text, model)
            strings = [text.tokenizer.token_string(token_id) for token_id in ids] if body.return_token_strs else None
            return Tokenized(count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=strings)

        return await self._answer(request, work)

    async def detokenize(self, request: web.Request) -> web.Response:
        def work(raw: bytes) -> Detokenized:
            body = detokenize_body(raw)
            return Detokenized(prompt=text_of(body, self._requests.text, self._model(body.model)))

        return await self._answer(request, work)

    async def version(self, request: web.Request) -> web.Response:
        return _json(Version(version=importlib.metadata.version("greenroom")))

    def _model(self, name: str | None) -> ServedModel:
        return self._requests.text_model_named(self._requests.model.name if name is None else name)

    async def _answer(self, request: web.Request, work: Callable[[bytes], Tokenized | Detokenized]) -> web.Response:
        caller = request[CALLER]
        call = CallHeaders(base=base_id(caller.name, None), caller=caller)
        with self._requests.enter(call):
            raw = await read_json(request, self._requests.config)
            return _json(await self._requests.prepare(len(raw), lambda: work(raw)))


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
