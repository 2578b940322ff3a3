"""Around every HTTP request: its id, its log line, its metrics, and errors in OpenAI's shape whatever goes wrong."""

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
from greenroom.gateway.access_log import ACCESS_LOG, fields
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.hosts import Hosts, Origins, is_preflight
from greenroom.gateway.errors import ApiError, ClientGone, as_api_error, defect
from greenroom.gateway.http.routes import UNMATCHED, Handler, check_expectations, route_of
from greenroom.gateway.http.sse import drop
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.reply_headers import HINTS_HEADER, REPLY_ID_HEADER
from greenroom.gateway.requests.call_headers import VISIBLE

_LOG = logging.getLogger(__name__)
CLIENT_CLOSED = 499
_HEALTH = "/health"
_READY = "/v2/health/ready"
_PROBES = (
    _HEALTH,
    "/live",
    "/metrics",
    "/v2/health/live",
    _READY,
)  # asked every few seconds, so not worth a line while all is well


@dataclass(slots=True)
class Note:
    """What the log line and the span of one request say beside the usual; filled in while it is answered.

    ``given_id``: the header ``X-Request-Id``. ``base``: the id that the ids of its sequences begin with. ``hints``:
    fields of its body that the answer does not depend on. ``param``: the field at fault.
    """

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
    """Whether the server, not the client, is at fault."""

    def failed(self, error: ApiError) -> None:
        """This is what the client is told, whatever status the reply began with."""
        self.code, self.param, self.at_fault = error.code, error.param, error.status >= 500


_NOTE = web.RequestKey("note", Note)


def note_of(request: web.Request) -> Note:
    return request[_NOTE]


def request_middleware(config: GatewayConfig, metrics: GatewayMetrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The outermost middleware: every reply goes through it."""
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
                path = route_of(request)
                metrics.answered(path, status)
                if note.code is not None:
                    metrics.error(note.code)
                ACCESS_LOG.log(
                    levels.of(path, status, note.code),
                    "%s %s %s %d %.1f ms%s",
                    note.request_id,
                    request.method,
                    request.rel_url.raw_path,
                    status,
                    (time.monotonic() - began) * 1000,
                    fields(key=note.caller, request_id=note.base, error=note.code, param=note.param, user=note.user),
                )

    return middleware


def page_middleware(hosts: Hosts, origins: Origins) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Checks of a web page's requests. They come before the key, since a browser sends none with its preflight."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts.check(request.headers.getall("Host", ()), probe=route_of(request) in _PROBES)
        if origins and is_preflight(request.method, request.headers):
            return web.Response(status=204, headers=origins.preflight(request.headers))
        return await handler(request)

    return middleware


class _Levels:
    """At which level a request is logged. An answer of a readiness probe is worth a line only where it
    differs from the last."""

    def __init__(self) -> None:
        self._unready: dict[str, str | None] = {}

    def of(self, path: str, status: int, code: str | None) -> int:
        if path in (_HEALTH, _READY) and status in (200, 503):
            before, self._unready[path] = self._unready.get(path), code
            return logging.DEBUG if code == before else logging.INFO
        return logging.DEBUG if path in _PROBES and status < 400 else logging.INFO


async def name_reply(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every reply carries ``X-Request-Id``, and the id of what it generates where it does."""
    note = note_of(request)
    response.headers["X-Request-Id"] = note.request_id
    if note.base is not None:
        response.headers[REPLY_ID_HEADER] = note.base
    if note.hints:
        response.headers[HINTS_HEADER] = ", ".join(note.hints)
    response.headers["Server"] = "greenroom"


@contextmanager
def _traced(request: web.Request, note: Note) -> Iterator[telemetry.Span]:
    """The request's span, marked as failed only where the server is at fault. Probes have none."""
    route = route_of(request)
    if route in _PROBES or not telemetry.enabled():
        yield telemetry.Span()
        return
    method = request.method if request.method in hdrs.METH_ALL else "_OTHER"
    sent = ((name.lower(), value) for name, value in request.headers.items())
    span = telemetry.begin(f"{method} {route}", parent=telemetry.extract(sent), kind="server")
    span.set("http.request.method", method)
    if route != UNMATCHED:
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
        check_expectations(request)
        return await handler(request)
    except ClientGone:
        raise
    except Exception as error:
        shaped = as_api_error(error)
        if shaped is None:
            _LOG.exception("%s failed", note.request_id)
            shaped = defect()
        note.failed(shaped)
        return shaped.response(infer=_is_infer(request))


def _is_infer(request: web.Request) -> bool:
    """Whether its errors have the Open Inference Protocol's shape."""
    return request.path == "/v2" or request.path.startswith("/v2/")


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
