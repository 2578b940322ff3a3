"""One HTTP exchange: its id, its log line, its metrics, and errors in OpenAI's shape whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import hdrs, web

from greenroom.fabric import current_request, telemetry
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.hosts import Hosts, Origins, is_preflight
from greenroom.gateway.errors import ApiError, ClientGone, as_api_error, defect, too_large
from greenroom.gateway.http.sse import drop
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.requests.call_headers import VISIBLE

ACCESS_LOG = logging.getLogger("greenroom.gateway.access")
_LOG = logging.getLogger(__name__)
CLIENT_CLOSED = 499
REPLY_ID_HEADER = "Greenroom-Request-Id"
HINTS_HEADER = "Greenroom-Without-Effect"
_HEALTH = "/health"
_PROBES = (_HEALTH, "/live", "/metrics")  # asked every few seconds, so not worth a line while all is well
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Note:
    """What the log line and the span of one exchange will say beside the usual; filled in while it is answered.
    ``given_id``: the header ``X-Request-Id``. ``base``: the id that the ids of its sequences begin with. ``hints``:
    fields of its body that the answer does not depend on. ``param``: the field at fault."""

    given_id: str | None
    request_id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    base: str | None = None
    caller: str | None = None
    user: str | None = None
    hints: tuple[str, ...] = ()
    code: str | None = None
    param: str | None = None
    sent: int | None = None
    """The status of a reply in parts whose end has been sent: the client has all of it, and may leave."""
    at_fault: bool = False
    """Whether it is the server's doing that it went wrong."""

    def failed(self, error: ApiError) -> None:
        """This is what the client is told, whatever status the reply began with."""
        self.code, self.param, self.at_fault = error.code, error.param, error.status >= 500


_NOTE = web.RequestKey("note", Note)


def note_of(request: web.Request) -> Note:
    return request[_NOTE]


def exchange_middleware(config: GatewayConfig, metrics: GatewayMetrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The outermost middleware: nothing leaves the server but through it."""
    levels = _Levels()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        note = request[_NOTE] = Note(request.headers.get("X-Request-Id"))
        current_request.request_id.set(note.request_id)
        status = CLIENT_CLOSED
        with _traced(request, note) as span:
            try:
                response = await _answer(request, handler, note)
                await _send(request, response, config.slow_client_timeout_s)
                status = response.status
                span.set("http.response.status_code", status)
                return response
            except ClientGone:
                note.code = "client_gone"
                return web.Response(status=CLIENT_CLOSED)
            except asyncio.CancelledError:
                if note.sent is None:
                    note.code = "client_gone"
                else:
                    status = note.sent
                raise
            finally:
                path = _route(request)
                metrics.answered(path, status)
                if note.code is not None:
                    metrics.error(note.code)
                ACCESS_LOG.log(
                    levels.of(path, status, note.code),
                    "%s %s %s %d %.1f ms%s%s%s%s%s",
                    note.request_id,
                    request.method,
                    request.rel_url.raw_path,
                    status,
                    (time.monotonic() - began) * 1000,
                    f" key={note.caller}" if note.caller else "",
                    f" id={note.base}" if note.base else "",
                    f" error={note.code}" if note.code else "",
                    f" param={note.param!r:.80}" if note.param else "",
                    f" user={note.user!r:.80}" if note.user else "",
                )

    return middleware


def page_middleware(hosts: Hosts, origins: Origins) -> Callable[..., Awaitable[web.StreamResponse]]:
    """What is asked before any key: a browser sends none with its preflight."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts.check(request.headers.getall("Host", ()))
        if origins and is_preflight(request.method, request.headers):
            return web.Response(status=204, headers=origins.preflight(request.headers))
        return await handler(request)

    return middleware


class _Levels:
    """At which level an exchange is logged. Of the answers of /health only those that differ from the one before."""

    def __init__(self) -> None:
        self._unready: str | None = None

    def of(self, path: str, status: int, code: str | None) -> int:
        if path == _HEALTH and status in (200, 503):
            before, self._unready = self._unready, code
            return logging.DEBUG if code == before else logging.INFO
        return logging.DEBUG if path in _PROBES and status < 400 else logging.INFO


async def name_reply(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every reply carries the exchange's id, and the request's own where one was made."""
    note = note_of(request)
    response.headers["X-Request-Id"] = note.request_id
    if note.base is not None:
        response.headers[REPLY_ID_HEADER] = note.base
    if note.hints:
        response.headers[HINTS_HEADER] = ", ".join(note.hints)
    response.headers["Server"] = "greenroom"


async def read_json(request: web.Request, config: GatewayConfig) -> bytes:
    """The body, which must say that it is JSON: so no web page can send it unasked.

    Raises ApiError: 415, 413, 408, 400.
    """
    if "Content-Type" not in request.headers or request.content_type != "application/json":
        raise ApiError(
            415, "send the body as JSON, with the header Content-Type: application/json", code="unsupported_media_type"
        )
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ApiError(415, "send the body in UTF-8", code="unsupported_media_type")
    if (request.content_length or 0) > config.max_body_bytes:
        raise too_large(config.max_body_bytes)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not come within {config.body_timeout_s:g} seconds"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(config.max_body_bytes) from None
    except ConnectionError as error:
        raise ClientGone("closed the connection before its request was complete") from error
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body can not be read: {error}", code="invalid_body") from error


@contextmanager
def _traced(request: web.Request, note: Note) -> Iterator[telemetry.Span]:
    """The exchange's span, which is marked as failed only where the server is at fault. Probes have none."""
    route = _route(request)
    if route in _PROBES or not telemetry.enabled():
        yield telemetry.Span()
        return
    method = request.method if request.method in hdrs.METH_ALL else "_OTHER"
    sent = ((name.lower(), value) for name, value in request.headers.items())
    span = telemetry.begin(f"{method} {route}", parent=telemetry.extract(sent), kind="server")
    span.set("http.request.method", method)
    if request.match_info.route.resource is not None:
        span.set("http.route", route)
    try:
        with span.active():
            yield span
    finally:
        if note.code is not None:
            span.set("code", note.code)
        if note.at_fault:
            span.set("error.type", note.code or "")
            span.fail(note.code or "")
        span.end()


async def _answer(request: web.Request, handler: Handler, note: Note) -> web.StreamResponse:
    try:
        _check_id(note)
        current_request.request_id.set(note.request_id)
        return await handler(request)
    except ClientGone:
        raise
    except Exception as error:
        shaped = as_api_error(error)
        if shaped is None:
            _LOG.exception("%s failed", note.request_id)
            shaped = defect()
        note.failed(shaped)
        return shaped.response()


def _check_id(note: Note) -> None:
    given = note.given_id
    if given is not None and VISIBLE.fullmatch(given):
        note.request_id = given
    elif given is not None:
        raise ApiError(
            400, "the header X-Request-Id takes 1 to 128 visible ASCII characters", code="invalid_request_id"
        )


async def _send(request: web.Request, response: web.StreamResponse, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        drop(request)
        raise ClientGone(f"took nothing for {timeout_s:g} seconds") from None
    except ConnectionError as error:
        raise ClientGone("closed the connection") from error


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical
