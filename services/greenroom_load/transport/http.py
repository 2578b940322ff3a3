"""OpenAI's HTTP API: chat completions and completions, streamed."""

from __future__ import annotations

import os
import ssl
from typing import Any

import aiohttp
import msgspec

from greenroom_load.prompts import Ask
from greenroom_load.reply_record import Exchange, Failure, FailureKind, Refused, clock
from greenroom_load.transport.base import NotReady, Prepared, Style, slo_headers, until_ready
from greenroom_load.transport.sse import Event, LineTooLong, SseParser

_CONNECT_TIMEOUT_S = 10.0
_KEEP_IDLE_S = 4.0
_PROBE_TIMEOUT_S = 5.0
_ERROR_BYTES = 64 * 1024
_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Part(msgspec.Struct):
    """A part of a reply of either API; all other fields are skipped unread."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    approximated: float | None = None
    error: _Error | None = None


class _Models(msgspec.Struct):
    class One(msgspec.Struct):
        id: str

    data: list[One]


_PARTS = msgspec.json.Decoder(_Part)
_MODELS = msgspec.json.Decoder(_Models)


class HttpTransport:
    """One keep-alive connection for each request in flight, none of them limited here."""

    def __init__(self, url: str, style: Style) -> None:
        self.address = url.rstrip("/").removesuffix("/v1")
        self._style = style
        self._path = "/v1/chat/completions" if style.api == "chat" else "/v1/completions"
        self._headers = {"Content-Type": "application/json", **style.headers}
        if style.api_key is not None:
            self._headers["Authorization"] = f"Bearer {style.api_key}"
        self._opened: aiohttp.ClientSession | None = None

    @property
    def kind(self) -> str:
        return "openai-chat" if self._style.api == "chat" else "openai"

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "open() comes first"
        return self._opened

    async def open(self) -> None:
        # No timeouts of aiohttp's own but for connecting: the whole request has one, and a timer a read costs time.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        # Idle connections go before servers close them (uvicorn: after 5 s): no request is sent into a closing one.
        trusted = ssl.create_default_context(cafile=self._style.ca_file) if self._style.ca_file else True
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=_KEEP_IDLE_S, ssl=trusted)
        self._opened = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def wait_ready(self, timeout_s: float) -> None:
        await until_ready(self.address, self._health, timeout_s)

    async def _health(self) -> str | None:
        """None if it takes requests, else what it says. A server without /health is taken as ready if it answers."""
        probe = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.address}/health", timeout=probe) as response:
                if response.status < 500:
                    return None
                return f"/health says {response.status} {(await response.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            return str(error) or type(error).__name__

    async def model(self) -> str:
        probe = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.address}/v1/models", timeout=probe) as response:
                raw = await response.read()
            if response.status == 200 and (models := _MODELS.decode(raw).data):
                return models[0].id
            said = f"{response.status} {raw[:200].decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            said = str(error) or type(error).__name__
        raise NotReady(f"{self.address}/v1/models does not say which model there is ({said}); name it with --model")

    def prepare(self, ask: Ask, model: str, request_id: str) -> Prepared:
        style = self._style
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if style.api == "chat":
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in ask.prompt.turns]
        else:
            body["prompt"] = ask.prompt.text
        body["max_tokens"] = ask.max_tokens
        if style.temperature is not None:
            body["temperature"] = style.temperature
        if style.ignore_eos:
            body["ignore_eos"] = True
        if style.send_task_type and ask.prompt.task:
            body["task_type"] = ask.prompt.task
        headers = [("X-Request-Id", request_id)]
        if style.send_slo is not None and ask.targets is not None:
            if style.send_slo == "fields":
                body["slo"] = ask.targets.given
            else:
                headers += slo_headers(ask.targets)
        return Prepared(msgspec.json.encode({**body, **style.extra}), tuple(headers))

    async def send(self, prepared: Prepared, exchange: Exchange) -> None:
        stage = "before the reply"
        try:
            async with self._session.post(
                self.address + self._path, data=prepared.payload, headers=prepared.headers, allow_redirects=False
            ) as response:
                exchange.request_id = response.headers.get("X-Request-Id")
                if response.status != 200:
                    raise Refused(_refusal(response, await response.content.read(_ERROR_BYTES)))
                stage = "in the reply"
                await _read(response, exchange)
        except aiohttp.ClientConnectorError as error:
            raise Refused(Failure(FailureKind.CONNECT, _os_name(error), str(error))) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise Refused(Failure(FailureKind.CONNECT, "timeout", str(error))) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Refused(Failure(FailureKind.CUT, stage, str(error) or type(error).__name__)) from error


async def _read(response: aiohttp.ClientResponse, exchange: Exchange) -> None:
    parser = SseParser()
    done = False
    async for read in response.content.iter_any():
        now = clock()
        try:
            for event in parser.feed(read):
                if event.data == _DONE:
                    done = True
                else:
                    _take(event, exchange, now)
        except (msgspec.MsgspecError, LineTooLong) as error:
            raise Refused(Failure(FailureKind.BAD_REPLY, "not a part of a reply", str(error))) from error
    if exchange.end is None:
        if not done:
            if response.content_type != "text/event-stream":
                raise Refused(Failure(FailureKind.BAD_REPLY, f"{response.content_type} instead of an event stream"))
            raise Refused(
                Failure(FailureKind.CUT, "in the reply", "the stream ended without [DONE] or a finish_reason")
            )
        exchange.ended(None, clock())


def _take(event: Event, exchange: Exchange, now: float) -> None:
    part = _PARTS.decode(event.data)
    if part.error is not None or event.name == b"error":
        error = part.error or _Error(event.data[:200].decode(errors="replace"))
        raise Refused(Failure(FailureKind.STREAM, _code(error), error.message))
    if part.usage is not None:
        exchange.used(part.usage.prompt_tokens, part.usage.completion_tokens)
    if part.approximated is not None:
        exchange.routed(part.approximated)
    for choice in part.choices:
        text = choice.text
        if choice.delta is not None:
            text = choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning
        if text:
            exchange.heard(text, now)
        if choice.finish_reason is not None:
            exchange.ended(choice.finish_reason, now)


def _refusal(response: aiohttp.ClientResponse, raw: bytes) -> Failure:
    try:
        error = _PARTS.decode(raw).error or _Error(raw[:200].decode(errors="replace"))
    except msgspec.MsgspecError:
        error = _Error(raw[:200].decode(errors="replace"))
    status = response.status
    kind = FailureKind.LIMITED if status == 429 else FailureKind.REFUSED if status < 500 else FailureKind.SERVER
    reason = _code(error) or (response.reason or "").lower()
    if kind is not FailureKind.LIMITED:
        reason = f"{status} {reason}".strip()
    return Failure(kind, reason, error.message, str(status), _seconds(response.headers.get("Retry-After")))


def _code(error: _Error) -> str:
    code = error.code if isinstance(error.code, str) else None
    return code or error.type or ""


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # a date, which is of no use here


def _os_name(error: aiohttp.ClientConnectorError) -> str:
    number = error.os_error.errno
    return os.strerror(number).lower() if number is not None and number > 0 else "host not found or not reachable"
