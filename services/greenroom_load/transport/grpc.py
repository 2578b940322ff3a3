"""greenroom's gRPC API, greenroom.v1.Inference, streamed."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from greenroom.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from greenroom_load.prompts import Ask
from greenroom_load.reply_record import Exchange, Failure, FailureKind, Refused, clock
from greenroom_load.transport.base import NotReady, Prepared, Style, slo_headers, until_ready

_PROBE_TIMEOUT_S = 5.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0), ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000))  # fmt: skip
_FINISH = {
    common_pb2.END_REASON_STOP: "stop",
    common_pb2.END_REASON_LENGTH: "length",
}
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
}


class GrpcTransport:
    """All requests are streams of one connection. ``target``: HOST:PORT."""

    kind = "greenroom-grpc"

    def __init__(self, target: str, style: Style, *, secure: bool = False) -> None:
        self.address = f"{'grpcs' if secure else 'grpc'}://{target}"
        self._target = target
        self._secure = secure
        self._style = style
        self._metadata = [(name.lower(), value) for name, value in style.headers.items()]
        if style.api_key is not None:
            self._metadata.append(("authorization", f"Bearer {style.api_key}"))
        self._channel: grpc.aio.Channel | None = None

    @property
    def _opened(self) -> grpc.aio.Channel:
        assert self._channel is not None, "open() comes first"
        return self._channel

    async def open(self) -> None:
        if self._secure:
            trusted = self._style.ca_file.read_bytes() if self._style.ca_file is not None else None
            self._channel = grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(trusted), _OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(self._target, _OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def wait_ready(self, timeout_s: float) -> None:
        await until_ready(self.address, self._health, timeout_s)

    async def _health(self) -> str | None:
        """None if it takes requests, else what it says. A server without the health service is ready if it answers."""
        try:
            check = self._opened.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            found = await check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return None if error.code() is grpc.StatusCode.UNIMPLEMENTED else _said(error)
        serving = health_pb2.HealthCheckResponse.SERVING
        return None if found.status == serving else "its health service says that it is not serving"

    async def model(self) -> str:
        try:
            found = await self._stub.GetModel(
                inference_pb2.GetModelRequest(), timeout=_PROBE_TIMEOUT_S, metadata=tuple(self._metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise NotReady(
                f"{self.address} does not say which model it has ({_said(error)}); name it with --model"
            ) from error
        return found.name

    def prepare(self, ask: Ask, model: str, request_id: str) -> Prepared:
        style = self._style
        request = inference_pb2.GenerateRequest(model=model, max_tokens=ask.max_tokens, ignore_eos=style.ignore_eos)
        if style.api == "chat":
            turns = [inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in ask.prompt.turns]
            request.chat.CopyFrom(inference_pb2.Chat(messages=turns))
        else:
            request.text = ask.prompt.text
        if style.temperature is not None:
            request.temperature = style.temperature
        if style.send_task_type and ask.prompt.task:
            request.task_type = ask.prompt.task
        metadata = [*self._metadata, ("x-request-id", request_id)]
        if style.send_slo is not None and ask.targets is not None:
            if style.send_slo == "fields":
                request.slo.CopyFrom(inference_pb2.Slo(**ask.targets.given))
            else:
                metadata += slo_headers(ask.targets)
        return Prepared(request, tuple(metadata))

    async def send(self, prepared: Prepared, exchange: Exchange) -> None:
        call = self._stub.GenerateStream(prepared.payload, metadata=prepared.headers)
        try:
            async for event in call:
                now = clock()
                exchange.request_id = event.request_id or exchange.request_id
                if event.text or event.tokens.ids:
                    exchange.heard(event.text, now)
                if event.HasField("end"):
                    _end(event.end, exchange, now)
            if exchange.end is None:
                raise Refused(Failure(FailureKind.CUT, "in the reply", "the stream ended without its last event"))
        except grpc.aio.AioRpcError as error:
            raise Refused(_failure(error, exchange)) from error
        finally:
            call.cancel()


def _end(end: inference_pb2.End, exchange: Exchange, now: float) -> None:
    if end.reason not in _FINISH:
        name = common_pb2.EndReason.Name(end.reason).removeprefix("END_REASON_").lower()
        kind = FailureKind.LIMITED if end.reason == common_pb2.END_REASON_SHED else FailureKind.STREAM
        raise Refused(Failure(kind, name, f"the server ended the request as {name}", name))
    exchange.used(end.usage.prompt_tokens, end.usage.completion_tokens)
    if not end.usage.approximated_unknown:
        exchange.routed(end.usage.approximated)
    exchange.ended(_FINISH[end.reason], now)


def _failure(error: grpc.aio.AioRpcError, exchange: Exchange) -> Failure:
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    code, word = error.code(), trailing.get("greenroom-code", "")
    reason = word or code.name.lower()
    began = exchange.first is not None
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = FailureKind.LIMITED
    elif code in _REFUSED:
        kind = FailureKind.REFUSED
    elif code is grpc.StatusCode.UNAVAILABLE and not word:
        kind = FailureKind.CUT if began else FailureKind.CONNECT
    else:
        kind = FailureKind.STREAM if began else FailureKind.SERVER
    try:
        after = float(trailing["retry-after"])
    except (KeyError, ValueError):
        after = None
    return Failure(kind, reason, error.details() or "", code.name, after)


def _said(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no details'}"
