"""/openapi.json: the HTTP API in OpenAPI 3.1, made from the structs of requests and replies."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

import msgspec

from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.keys import MAX_PRIORITY
from greenroom.gateway.http.openapi_schemas import REF, Json, schemas_of
from greenroom.gateway.replies.infer_bodies import (
    InferErrorBody,
    InferReply,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
)
from greenroom.gateway.replies.reply_bodies import (
    ChatCompletion,
    Condition,
    Detokenized,
    ErrorBody,
    Model,
    ModelList,
    TextCompletion,
    Tokenized,
    Version,
)
from greenroom.gateway.replies.reply_headers import HINTS_HEADER, INFER_LENGTH_HEADER, REPLY_ID_HEADER
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody
from greenroom.gateway.requests.call_headers import PRIORITY_HEADER, SLO_HEADERS
from greenroom.gateway.requests.inferences.infer_body import InferBody
from greenroom.gateway.requests.token_bodies import DetokenizeBody, TokenizeBody

_ERRORS: Mapping[int, str] = {
    400: "The request can not be served as it stands; `param` names the field.",
    401: "No API key, or one that is not known.",
    403: "The header Host names another server, and keys are off.",
    404: "No such model.",
    408: "The body did not come in time.",
    409: "The idempotency key belongs to another request.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or its Content-Encoding is none that is taken.",
    417: "The header Expect asks for something else than 100-continue.",
    429: "A limit of the key or of the server: `rate_limited`, `too_many_concurrent`, `saturated`, `shed`.",
    500: "The generation failed, or the server did.",
    503: "Not ready, stopping, or not known whether the request was taken.",
    504: "Not finished in time.",
}
_GENERATING = (400, 401, 403, 404, 408, 409, 413, 415, 417, 429, 500, 503, 504)
_REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Comes back with the reply, and stands in the log.",
    "schema": {"type": "string", "pattern": "^[\\x21-\\x7e]{1,128}$"},
}
_HEADERS: list[Json] = [
    _REQUEST_ID,
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key is the same request: a retry gets the reply of the first, and runs nothing.",
        "schema": {"type": "string", "pattern": "^[\\x21-\\x7e]{1,128}$"},
    },
    *(
        {
            "name": header,
            "in": "header",
            "description": f"slo.{field} of the body.",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        }
        for field, header in SLO_HEADERS.items()
    ),
    {
        "name": PRIORITY_HEADER,
        "in": "header",
        "description": "priority of the body.",
        "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    },
]


def openapi(config: GatewayConfig) -> Json:
    """The document for a server of these settings."""
    schemas = schemas_of(config)
    chat = _generating("createChatCompletion", "Answer a chat", ChatBody, ChatCompletion, "ChatCompletionChunk", config)
    completion = _generating(
        "createCompletion", "Continue a text", CompletionBody, TextCompletion, "TextCompletion", config
    )
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "greenroom",
            "version": importlib.metadata.version("greenroom"),
            "description": "OpenAI's API. A field that is sent is honoured, or named: refused by name, or, where no "
            f"answer depends on it, taken and named in the header {HINTS_HEADER}.",
        },
        "paths": {
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": completion},
            "/v1/models": {"get": _reading("listModels", "The served model", ModelList, (401, 503), config)},
            "/v1/models/{id}": {
                "get": {
                    **_reading("getModel", "The model of that name", Model, (401, 404, 503), config),
                    "parameters": [
                        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
                        _REQUEST_ID,
                    ],
                }
            },
            "/tokenize": {"post": _tokens("tokenize", "A text or chat as tokens", TokenizeBody, Tokenized, config)},
            "/detokenize": {"post": _tokens("detokenize", "Tokens as text", DetokenizeBody, Detokenized, config)},
            "/version": {"get": _reading("version", "greenroom's version", Version, (), config, open_=True)},
            **_open_inference(config),
            "/health": {"get": _reading("health", "Whether requests are taken", Condition, (503,), config, open_=True)},
            "/live": {"get": _reading("live", "Whether the process answers", Condition, (), config, open_=True)},
            "/metrics": {"get": _metrics(config)},
            "/openapi.json": {
                "get": _operation(
                    "openapi",
                    "This document",
                    {"application/json": {"schema": {"type": "object"}}},
                    (403,),
                    config,
                    True,
                )
            },
        },
        "components": {"schemas": schemas},
    }
    if config.keys_file is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _generating(
    name: str, what: str, body: type[msgspec.Struct], reply: type[msgspec.Struct], chunk: str, config: GatewayConfig
) -> Json:
    content = {"application/json": {"schema": _ref(reply)}, "text/event-stream": {"schema": _event(chunk)}}
    operation = _operation(name, what, content, _GENERATING, config, False)
    operation["responses"]["200"]["headers"][REPLY_ID_HEADER] = {
        "description": "With which the ids of the reply and of its sequences begin, or end.",
        "schema": {"type": "string"},
    }
    operation["responses"]["200"]["headers"][HINTS_HEADER] = {
        "description": "Fields that were sent and that no answer depends on, with commas between, where there are any.",
        "schema": {"type": "string"},
    }
    return {
        **operation,
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
    }


def _tokens(
    name: str, what: str, body: type[msgspec.Struct], reply: type[msgspec.Struct], config: GatewayConfig
) -> Json:
    content = {"application/json": {"schema": _ref(reply)}}
    errors = (400, 401, 403, 404, 408, 413, 415, 417, 429, 503)
    return {
        **_operation(name, what, content, errors, config, False),
        "parameters": [_REQUEST_ID],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
    }


def _open_inference(config: GatewayConfig) -> Json:
    """/v2 and what is below it."""

    def reading(
        name: str, what: str, reply: type[msgspec.Struct], errors: Sequence[int], *, open_: bool = False
    ) -> Json:
        content = {"application/json": {"schema": _ref(reply)}}
        operation = _operation(name, what, content, (400, 403, *errors), config, open_, error=InferErrorBody)
        return {**operation, "parameters": [_REQUEST_ID]}

    def named(operation: Json, *more: str) -> Json:
        path = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in ("name", *more)
        ]
        return {**operation, "parameters": [*path, *operation["parameters"]]}

    paths: Json = {
        "/v2": {"get": reading("serverMetadata", "The server and its extensions", ServerMetadata, (401,))},
        "/v2/health/live": {"get": reading("serverLive", "Whether the process answers", Live, (), open_=True)},
        "/v2/health/ready": {"get": reading("serverReady", "Whether requests are taken", Ready, (503,), open_=True)},
    }
    for path, suffix, more in (
        ("/v2/models/{name}", "", ()),
        ("/v2/models/{name}/versions/{version}", "OfVersion", ("version",)),
    ):
        model = reading(f"modelMetadata{suffix}", "Its inputs and outputs", ModelMetadata, (401, 404, 503))
        ready = reading(f"modelReady{suffix}", "Whether it takes requests", ModelReady, (401, 404, 503))
        paths[path] = {"get": named(model, *more)}
        paths[f"{path}/ready"] = {"get": named(ready, *more)}
        paths[f"{path}/infer"] = {"post": named(_infer(f"modelInfer{suffix}", config), *more)}
    return paths


def _infer(name: str, config: GatewayConfig) -> Json:
    content = {
        "application/json": {"schema": _ref(InferReply)},
        "application/octet-stream": {
            "schema": {
                "description": f"The same, and tensors in binary form behind it; {INFER_LENGTH_HEADER} says where."
            }
        },
    }
    operation = _operation(name, "Judge a batch", content, _GENERATING, config, False, error=InferErrorBody)
    operation["responses"]["200"]["headers"][REPLY_ID_HEADER] = {
        "description": "With which the ids of the batch's requests begin.",
        "schema": {"type": "string"},
    }
    length = {
        "name": INFER_LENGTH_HEADER,
        "in": "header",
        "description": "How many bytes of the body are JSON, where tensors in binary form follow.",
        "schema": {"type": "integer", "minimum": 0},
    }
    return {
        **operation,
        "parameters": [length, *_HEADERS],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(InferBody)}}},
    }


def _event(chunk: str) -> Json:
    """The schema of one event of a stream; OpenAPI 3.1 has no other way to describe many."""
    payload = {"anyOf": [{"$ref": REF.format(name=chunk)}, _ref(ErrorBody)]}
    return {
        "type": "object",
        "description": f"Of each event: a `{chunk}`, at the end `[DONE]`; or, as an event `error`, an `ErrorBody`.",
        "properties": {
            "event": {"type": "string", "enum": ["message", "error"]},
            "data": {
                "anyOf": [
                    {"type": "string", "const": "[DONE]"},
                    {"type": "string", "contentMediaType": "application/json", "contentSchema": payload},
                ]
            },
        },
        "required": ["data"],
    }


def _reading(
    name: str,
    what: str,
    reply: type[msgspec.Struct],
    errors: Sequence[int],
    config: GatewayConfig,
    *,
    open_: bool = False,
) -> Json:
    content = {"application/json": {"schema": _ref(reply)}}
    return {**_operation(name, what, content, (400, 403, *errors), config, open_), "parameters": [_REQUEST_ID]}


def _metrics(config: GatewayConfig) -> Json:
    text = {"schema": {"type": "string"}}
    content = {"text/plain": text, "application/openmetrics-text": text}
    errors = (403,) if config.open_metrics else (401, 403)
    return _operation("metrics", "Prometheus's text format", content, errors, config, config.open_metrics)


def _operation(
    name: str,
    what: str,
    content: Json,
    errors: Sequence[int],
    config: GatewayConfig,
    open_: bool,
    *,
    error: type[msgspec.Struct] = ErrorBody,
) -> Json:
    keys = config.keys_file is not None
    responses: Json = {"200": {"description": what, "headers": _reply_headers(200), "content": content}}
    for status in errors:
        if status != 401 or keys:
            responses[str(status)] = {
                "description": _ERRORS[status],
                "headers": _reply_headers(status),
                "content": {"application/json": {"schema": _ref(error)}},
            }
    security: Json = {"security": [{"key": []}]} if keys and not open_ else {}
    return {"operationId": name, "summary": what, "responses": responses, **security}


def _reply_headers(status: int) -> Json:
    headers: Json = {"X-Request-Id": {"description": "The request's own, or a new one.", "schema": {"type": "string"}}}
    if status in (429, 503):
        headers["Retry-After"] = {
            "description": "Seconds after which it may go better.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    if status == 401:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"type": "string"}}
    return headers


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": REF.format(name=kind.__name__)}
