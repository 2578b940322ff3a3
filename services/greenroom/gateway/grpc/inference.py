"""The public RPCs, greenroom.v1.Inference. Checks and generations are those of the HTTP API."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import FinishReason, ServedModel, Token
from greenroom.fabric import current_request, telemetry
from greenroom.fabric.rpc import Context, Status
from greenroom.fabric.rpc.errors import DEFECT
from greenroom.fabric.rpc.spans import told
from greenroom.fabric.wire import to_end_reason, to_token_run
from greenroom.gateway.access_log import ACCESS_LOG, fields
from greenroom.gateway.doors.doorkeeper import Caller, Doorkeeper
from greenroom.gateway.errors import as_api_error, too_large
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.choices import Delta, GenerationFailed
from greenroom.gateway.replies.reply_headers import REPLY_ID_HEADER
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody, Message, SloBody
from greenroom.gateway.requests.call_headers import VISIBLE, CallHeaders, Headers, call_headers
from greenroom.gateway.requests.prepare import Prepared, prepare_chat, prepare_completion
from greenroom.gateway.requests.request_handler import RequestHandler
from greenroom.v1 import inference_pb2, inference_pb2_grpc

_SERVICE = "/greenroom.v1.Inference"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class InferenceApi(inference_pb2_grpc.InferenceServicer):
    """For a ``fabric.rpc`` server. That ends a call with what ``as_status`` makes of a handler's error."""

    def __init__(self, requests: RequestHandler, doorkeeper: Doorkeeper, metrics: GatewayMetrics) -> None:
        self._requests = requests
        self._doorkeeper = doorkeeper
        self._metrics = metrics

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        with self._noted("Generate", context) as note:
            reply = inference_pb2.GenerateResponse()
            texts: list[str] = []
            tokens: list[Token] = []
            async with aclosing(self._parts(request, context, note)) as parts:
                async for part in parts:
                    texts += [delta.text for delta in part.deltas]
                    tokens += part.tokens
                    if part.end is not None:
                        reply.reason = part.end.reason
                        reply.usage.CopyFrom(part.end.usage)
            run = to_token_run(tokens)
            reply.request_id = note.request_id
            reply.text = "".join(texts)
            reply.token_ids.extend(run.ids)
            reply.logprobs.extend(run.logprobs)
            return reply

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        with self._noted("GenerateStream", context) as note:
            async with aclosing(self._parts(request, context, note)) as parts:
                async for part in parts:
                    event = inference_pb2.GenerateEvent(
                        request_id=note.request_id,
                        text="".join(delta.text for delta in part.deltas),
                        tokens=to_token_run(part.tokens),
                        end=part.end,
                    )
                    with _Impatience(self._requests.config.slow_client_timeout_s):
                        yield event

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        with self._noted("Cancel", context) as note:
            caller = self._admit(context, note)
            if not VISIBLE.fullmatch(request.request_id):
                raise InvalidRequest("request_id takes the id of a request, as its reply has it", param="request_id")
            await self._requests.cancel(request.request_id, caller)
            return inference_pb2.CancelResponse()

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        with self._noted("GetModel", context) as note:
            self._admit(context, note)
            model = self._requests.model
            return inference_pb2.Model(
                name=model.name,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                has_chat_template=self._requests.has_chat,
            )

    async def _parts(
        self, request: inference_pb2.GenerateRequest, context: Context, note: _Note
    ) -> AsyncGenerator[_Part, None]:
        arrived = time.monotonic()
        caller = self._admit(context, note)
        call = call_headers(_headers(context), caller, patience_s=_patience_s(context))
        note.request_id = f"{call.base}-0"
        await context.send_initial_metadata(((REPLY_ID_HEADER.lower(), note.request_id),))
        with self._requests.enter(call):
            size = request.ByteSize()
            if size > self._requests.config.max_body_bytes:
                raise too_large(self._requests.config.max_body_bytes)
            model = self._requests.text_model_named(request.model or self._requests.model.name)
            prepared = await self._requests.prepare(size, lambda: self._prepare(request, model, call))
            async with self._requests.run(prepared, call, arrived, tokens=True) as running:
                while not running.generations.done:
                    deltas = await running.parts(self._requests.config.keep_alive_s)
                    if deltas:
                        yield _Part(deltas, prepared)

    def _prepare(self, request: inference_pb2.GenerateRequest, model: ServedModel, call: CallHeaders) -> Prepared:
        body, text, config = to_body(request, model), self._requests.text, self._requests.config
        if isinstance(body, ChatBody):
            return prepare_chat(body, text, model, call=call, config=config)
        return prepare_completion(body, text, model, call=call, config=config, default_tokens=None)

    def _admit(self, context: Context, note: _Note) -> Caller:
        given = _headers(context)("authorization")
        caller = self._doorkeeper.admit(given[0] if given else None, time.monotonic())
        note.caller = caller.name
        return caller

    @contextmanager
    def _noted(self, method: str, context: Context) -> Iterator[_Note]:
        """Makes the call's metrics, access-log line and trace, however the call ends."""
        began = time.monotonic()
        note = _Note()
        if not current_request.request_id.get():
            current_request.request_id.set(f"req-{uuid.uuid4().hex}")
        status, code, param = grpc.StatusCode.OK, None, None
        span = _begin_span(method)
        with span.active():
            try:
                yield note
            except (asyncio.CancelledError, GeneratorExit):
                status, code = grpc.StatusCode.CANCELLED, "client_gone"
                raise
            except Exception as error:
                shaped = as_status(error) or DEFECT
                status, code, param = shaped.code, shaped.word, _param_of(error)
                raise
            finally:
                told(span, status, code or "")
                span.end()
                self._metrics.called(method, status.name, code)
                ACCESS_LOG.log(
                    logging.DEBUG if method == "GetModel" and code is None else logging.INFO,
                    "%s grpc %s %s %.1f ms%s",
                    current_request.request_id.get(),
                    method,
                    status.name,
                    (time.monotonic() - began) * 1000,
                    fields(key=note.caller, request_id=note.request_id, error=code, param=param),
                )


class _Note:
    """What the access log says of a call; filled in while it is answered."""

    def __init__(self) -> None:
        self.request_id = ""
        self.caller = ""


class _Part:
    """The deltas that came together, and the end if one of them is the last."""

    def __init__(self, deltas: list[Delta], prepared: Prepared) -> None:
        self.deltas = deltas
        self.tokens = [token for delta in deltas for token in delta.tokens]
        last = deltas[-1]
        self.end: inference_pb2.End | None = None
        if last.finish is not None:
            usage = inference_pb2.Usage(
                prompt_tokens=prepared.prompt_tokens,
                completion_tokens=last.generated,
                approximated=last.approximated or 0.0,
                approximated_unknown=last.approximated is None,
            )
            self.end = inference_pb2.End(reason=to_end_reason(last.finish), usage=usage)


class _Impatience:
    """Cancels the task that is in it for longer than ``limit_s``: its caller does not read."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, task.cancel)

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()


def _begin_span(method: str) -> telemetry.Span:
    """Begins a trace where the caller sent no span; otherwise the guard has begun one."""
    return telemetry.Span() if telemetry.trace_id() else telemetry.begin(f"{_SERVICE}/{method}", kind="server")


def as_status(error: Exception) -> Status | None:
    """The HTTP API's error in gRPC's codes. The status's word is the HTTP API's ``code``."""
    shaped = as_api_error(error)
    if shaped is None:
        return None
    code = _CODES.get(shaped.status, grpc.StatusCode.INTERNAL)
    if isinstance(error, GenerationFailed) and error.reason is FinishReason.CANCELLED:
        code = grpc.StatusCode.CANCELLED
    after = shaped.headers.get("Retry-After")
    return Status(code, str(shaped), shaped.code, None if after is None else float(after))


def _param_of(error: Exception) -> str | None:
    shaped = as_api_error(error)
    return None if shaped is None else shaped.param


def to_body(request: inference_pb2.GenerateRequest, model: ServedModel) -> ChatBody | CompletionBody:
    """The body that the HTTP API has for the same request. Raises InvalidRequest where there is no prompt."""
    common: dict[str, Any] = {
        "model": model.name,
        "temperature": request.temperature if request.HasField("temperature") else None,
        "top_p": request.top_p if request.HasField("top_p") else None,
        "top_k": request.top_k,
        "seed": request.seed if request.HasField("seed") else None,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "max_tokens": request.max_tokens if request.HasField("max_tokens") else None,
        "ignore_eos": request.ignore_eos,
        "task_type": request.task_type or None,
        "slo": _slo(request.slo) if request.HasField("slo") else None,
        "priority": request.priority or None,
        "timeout": request.timeout_ms / 1000 if request.HasField("timeout_ms") else None,
    }
    logprobs = request.logprobs if request.HasField("logprobs") else None
    match request.WhichOneof("prompt"):
        case "chat":
            messages = [Message(role=message.role, content=message.content) for message in request.chat.messages]
            return ChatBody(messages=messages, logprobs=logprobs is not None, top_logprobs=logprobs, **common)
        case "text":
            return CompletionBody(prompt=request.text, logprobs=logprobs, **common)
        case "token_ids":
            return CompletionBody(prompt=list(request.token_ids.ids), logprobs=logprobs, **common)
        case _:
            raise InvalidRequest("send one of chat, text and token_ids", param="prompt", code="missing_field")


def _slo(slo: inference_pb2.Slo) -> SloBody:
    return SloBody(
        ttft_ms=slo.ttft_ms if slo.HasField("ttft_ms") else None,
        tpot_ms=slo.tpot_ms if slo.HasField("tpot_ms") else None,
        e2e_ms=slo.e2e_ms if slo.HasField("e2e_ms") else None,
    )


def _headers(context: Context) -> Headers:
    metadata = context.invocation_metadata() or ()

    def values(name: str) -> list[str]:
        return [value if isinstance(value, str) else value.decode("latin-1") for key, value in metadata if key == name]

    return values


def _patience_s(context: Context) -> float | None:
    """Seconds that the call may yet last. None: no limit."""
    left = context.time_remaining()
    return None if left is None else max(left, 0.001)
