"""The Open Inference Protocol, version 2, over HTTP: /v2 and what is below it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from greenroom.core.errors import InvalidRequest
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.held_bytes import CallBytes
from greenroom.gateway.errors import ApiError
from greenroom.gateway.http.bodies import check_utf8, read_body
from greenroom.gateway.http.endpoints import CALLER
from greenroom.gateway.http.middleware import note_of
from greenroom.gateway.http.routes import Routes
from greenroom.gateway.replies.infer_bodies import (
    InferReply,
    Live,
    ModelMetadata,
    ModelReady,
    OutputBody,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from greenroom.gateway.replies.output_tensors import OutputTensor, TensorKind, output_tensors
from greenroom.gateway.replies.reply_headers import INFER_LENGTH_HEADER
from greenroom.gateway.requests.call_headers import call_headers
from greenroom.gateway.requests.inferences.infer_body import decode_infer
from greenroom.gateway.requests.inferences.infer_call import InferCall
from greenroom.gateway.requests.inferences.prepare_inferences import PreparedInferences, prepare_inferences
from greenroom.gateway.requests.inferences.server_info import (
    EXTENSIONS,
    PLATFORM,
    SERVER,
    VERSION,
    check_version,
    inputs_of,
    outputs_of,
    server_version,
)
from greenroom.gateway.requests.request_handler import RequestHandler

_NAME = "{name:(?:(?!/infer$|/versions/).)+}"
_DIGITS = re.compile(r"[0-9]{1,12}")


class InferApi:
    """Answers from the same handler as OpenAI's endpoints, behind the same middlewares."""

    def __init__(self, requests: RequestHandler) -> None:
        self._requests = requests
        self._config = requests.config

    def add_to(self, routes: Routes) -> None:
        routes.get("/v2", self._server)
        routes.get("/v2/health/live", self._live)
        routes.get("/v2/health/ready", self._ready)
        # A name may have slashes. What stands behind it is looked for first, and `infer` is the end of no name.
        for path in (f"/v2/models/{_NAME}/versions/{{version}}", f"/v2/models/{_NAME}"):
            routes.post(path + "/infer", self._infer)
            routes.get(path + "/ready", self._model_ready)
            routes.get(path, self._model)

    async def _server(self, request: web.Request) -> web.Response:
        return _json(ServerMetadata(name=SERVER, version=server_version(), extensions=list(EXTENSIONS)))

    async def _live(self, request: web.Request) -> web.Response:
        return _json(Live(live=True))

    async def _ready(self, request: web.Request) -> web.Response:
        self._requests.check_ready()
        return _json(Ready(ready=True))

    async def _model(self, request: web.Request) -> web.Response:
        name, version = _named(request)
        model, card = self._requests.collaboration_named(name)
        check_version(version)
        return _json(
            ModelMetadata(
                name=model.name,
                versions=[VERSION],
                platform=PLATFORM,
                inputs=_metadata(inputs_of(card)),
                outputs=_metadata(outputs_of(model)),
            )
        )

    async def _model_ready(self, request: web.Request) -> web.Response:
        name, version = _named(request)
        self._requests.collaboration_named(name)  # else it answers 400, as infer does: it takes no inferences
        check_version(version)
        self._requests.check_ready()
        return _json(ModelReady(name=name, ready=True))

    async def _infer(self, request: web.Request) -> web.Response:
        arrived = time.monotonic()
        call = call_headers(lambda header: request.headers.getall(header, ()), request[CALLER])
        note_of(request).base = call.base
        name, version = _named(request)
        json_bytes = _json_bytes(request)
        with self._requests.enter(call):
            model, card = self._requests.collaboration_named(name)
            check_version(version)
            with self._requests.hold_bytes() as held:
                raw = await _read(request, self._config, held)
                asked: InferCall | None = None

                def prepare() -> PreparedInferences:
                    nonlocal asked
                    asked = decode_infer(raw, json_bytes, self._config.max_choices)
                    _check_agrees(asked, name, version)
                    return prepare_inferences(asked, model, card, call=call, config=self._config)

                prepared = await self._requests.prepare(len(raw), prepare)
                raw = b""  # `prepared` has what is needed of it, and once is what is counted
                assert asked is not None
                found = await self._requests.infer(prepared, call, arrived, held)
        return _reply(model.name, asked, output_tensors(prepared.outputs, found))


def _named(request: web.Request) -> tuple[str, str]:
    return request.match_info["name"], request.match_info.get("version", "")


def _check_agrees(asked: InferCall, name: str, version: str) -> None:
    """Raises InvalidRequest where the body names another model or version than the path."""
    for field, said, path in (("model_name", asked.model, name), ("model_version", asked.version, version or VERSION)):
        if said not in (None, path):
            raise InvalidRequest(f"{field} and the path differ; send one of them", param=field)


def _metadata(kinds: Iterable[TensorKind]) -> list[TensorMetadata]:
    return [TensorMetadata(name=kind.name, datatype=kind.datatype, shape=list(kind.shape)) for kind in kinds]


def _json_bytes(request: web.Request) -> int | None:
    given = request.headers.getall(INFER_LENGTH_HEADER, ())
    if not given:
        return None
    if len(given) > 1 or not _DIGITS.fullmatch(given[0].strip()):
        raise InvalidRequest(
            f"the header {INFER_LENGTH_HEADER} takes a number of bytes", param=INFER_LENGTH_HEADER.lower()
        )
    return int(given[0])


async def _read(request: web.Request, config: GatewayConfig, held: CallBytes) -> bytes:
    """The body; its bytes are ``held``. A page of another site can send no body of this type, nor that header, unasked;
    a body without a type, as Triton's client sends it, is taken only from what is no page. Raises ApiError: 415, 413,
    408, 400, 429."""
    typed = request.headers.get("Content-Type")
    json = typed is not None and request.content_type == "application/json"
    if not (json or INFER_LENGTH_HEADER in request.headers or (typed is None and "Origin" not in request.headers)):
        raise ApiError(
            415,
            "send the body as JSON, with the header Content-Type: application/json; with tensors in binary form behind "
            f"it the header {INFER_LENGTH_HEADER} says how long the JSON is",
            code="unsupported_media_type",
        )
    check_utf8(request)
    return await read_body(request, config.max_infer_body_bytes, config.body_timeout_s, held.add)


def _reply(model: str, asked: InferCall, tensors: list[OutputTensor]) -> web.Response:
    wanted = {one.name: one.binary for one in asked.outputs}
    bodies: list[OutputBody] = []
    raws: list[bytes] = []
    for tensor in tensors:
        binary = wanted.get(tensor.name)
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if asked.binary if binary is None else binary:
            raws.append(tensor.raw())
            bodies.append(OutputBody(**described, parameters={"binary_data_size": len(raws[-1])}))
        else:
            bodies.append(OutputBody(**described, data=list(tensor.values)))
    reply = InferReply(
        model_name=model, model_version=VERSION, outputs=bodies, **({"id": asked.id} if asked.id else {})
    )
    head = msgspec.json.encode(reply)
    if not raws:
        return web.Response(body=head, content_type="application/json")
    headers = {INFER_LENGTH_HEADER: str(len(head)), "Content-Type": "application/octet-stream"}
    return web.Response(body=b"".join((head, *raws)), headers=headers)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
