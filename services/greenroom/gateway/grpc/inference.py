"""The public RPCs, greenroom.v1.Inference. Checks and generations are those of the HTTP API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import ServedModel, Token
from greenroom.fabric.rpc import Context
from greenroom.fabric.wire import to_end_reason, to_logprobs, to_token_run
from greenroom.gateway.doors.doorkeeper import Doorkeeper
from greenroom.gateway.errors import too_large
from greenroom.gateway.grpc.calls import CallDoor, Impatience, Note, headers_of, patience_s
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.choices import Delta
from greenroom.gateway.replies.reply_headers import REPLY_ID_HEADER
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody, Message, SloBody
from greenroom.gateway.requests.call_headers import VISIBLE, CallHeaders, call_headers
from greenroom.gateway.requests.prepare import Prepared, prepare_chat, prepare_completion
from greenroom.gateway.requests.request_handler import RequestHandler
from greenroom.v1 import inference_pb2, inference_pb2_grpc

_SERVICE = "greenroom.v1.Inference"


class InferenceApi(inference_pb2_grpc.InferenceServicer):
    """For a ``fabric.rpc`` server. That ends a call with what ``as_status`` makes of a handler's error."""

    def __init__(self, requests: RequestHandler, doorkeeper: Doorkeeper, metrics: GatewayMetrics) -> None:
        self._requests = requests
        self._door = CallDoor(_SERVICE, doorkeeper, metrics, quiet=frozenset({"GetModel"}))

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        with self._door.noted("Generate") as note:
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
                        if part.end.HasField("prompt"):
                            reply.prompt.CopyFrom(part.end.prompt)
            run = to_token_run(tokens)
            reply.request_id = note.request_id
            reply.text = "".join(texts)
            reply.token_ids.extend(run.ids)
            reply.logprobs.extend(run.logprobs)
            return reply

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        with self._door.noted("GenerateStream") as note:
            async with aclosing(self._parts(request, context, note)) as parts:
                async for part in parts:
                    event = inference_pb2.GenerateEvent(
                        request_id=note.request_id,
                        text="".join(delta.text for delta in part.deltas),
                        tokens=to_token_run(part.tokens),
                        end=part.end,
                    )
                    with Impatience(self._requests.config.slow_client_timeout_s):
                        yield event

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        with self._door.noted("Cancel") as note:
            caller = self._door.admit(context, note)
            if not VISIBLE.fullmatch(request.request_id):
                raise InvalidRequest("request_id takes the id of a request, as its reply has it", param="request_id")
            await self._requests.cancel(request.request_id, caller)
            return inference_pb2.CancelResponse()

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        with self._door.noted("GetModel") as note:
            self._door.admit(context, note)
            model = self._requests.model
            return inference_pb2.Model(
                name=model.name,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                has_chat_template=self._requests.has_chat,
            )

    async def _parts(
        self, request: inference_pb2.GenerateRequest, context: Context, note: Note
    ) -> AsyncGenerator[_Part, None]:
        arrived = time.monotonic()
        caller = self._door.admit(context, note)
        call = call_headers(headers_of(context), caller, patience_s=patience_s(context))
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
        defaults = self._requests.defaults
        scored = request.prompt_logprobs if request.HasField("prompt_logprobs") else None
        if isinstance(body, ChatBody):
            return prepare_chat(body, text, model, call=call, config=config, defaults=defaults, prompt_logprobs=scored)
        return prepare_completion(
            body,
            text,
            model,
            call=call,
            config=config,
            defaults=defaults,
            prompt_logprobs=scored,
            default_tokens=None,
        )


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
            if last.prompt_logprobs is not None:
                self.end.prompt.ids.extend(prepared.jobs[0].request.prompt_ids)
                self.end.prompt.logprobs.extend(map(to_logprobs, last.prompt_logprobs))


def to_body(request: inference_pb2.GenerateRequest, model: ServedModel) -> ChatBody | CompletionBody:
    """The body that the HTTP API has for the same request. Raises InvalidRequest where there is no prompt."""
    common: dict[str, Any] = {
        "model": model.name,
        "temperature": request.temperature if request.HasField("temperature") else None,
        "top_p": request.top_p if request.HasField("top_p") else None,
        "top_k": request.top_k or None,
        "min_p": request.min_p if request.HasField("min_p") else None,
        "repetition_penalty": request.repetition_penalty if request.HasField("repetition_penalty") else None,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()},
        "min_tokens": request.min_tokens,
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
