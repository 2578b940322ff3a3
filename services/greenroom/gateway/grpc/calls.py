"""Around every RPC: who calls, its log line, metrics and span, and errors as statuses. As http/middleware over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from greenroom.core.generation import FinishReason
from greenroom.fabric import current_request, telemetry
from greenroom.fabric.rpc import Context, Status
from greenroom.fabric.rpc.errors import DEFECT
from greenroom.fabric.rpc.spans import told
from greenroom.gateway.access_log import ACCESS_LOG, fields
from greenroom.gateway.doors.doorkeeper import Caller, Doorkeeper
from greenroom.gateway.errors import as_api_error
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.choices import GenerationFailed
from greenroom.gateway.requests.call_headers import Headers

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


class Note:
    """What the access log says of a call; filled in while it is answered."""

    def __init__(self) -> None:
        self.request_id = ""
        self.caller = ""


class CallDoor:
    """Of one service. ``quiet``: methods whose calls are worth a line only where they fail."""

    def __init__(
        self, service: str, doorkeeper: Doorkeeper, metrics: GatewayMetrics, *, quiet: frozenset[str] = frozenset()
    ) -> None:
        self._service = service
        self._doorkeeper = doorkeeper
        self._metrics = metrics
        self._quiet = quiet

    def admit(self, context: Context, note: Note) -> Caller:
        """Raises ApiError (401)."""
        given = headers_of(context)("authorization")
        caller = self._doorkeeper.admit(given[0] if given else None, time.monotonic())
        note.caller = caller.name
        return caller

    @contextmanager
    def noted(self, method: str) -> Iterator[Note]:
        """Makes the call's metrics, access-log line and trace, however the call ends."""
        began = time.monotonic()
        note = Note()
        if not current_request.request_id.get():
            current_request.request_id.set(f"req-{uuid.uuid4().hex}")
        status, code, param = grpc.StatusCode.OK, None, None
        span = self._begin_span(method)
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
                    logging.DEBUG if method in self._quiet and code is None else logging.INFO,
                    "%s grpc %s %s %.1f ms%s",
                    current_request.request_id.get(),
                    method,
                    status.name,
                    (time.monotonic() - began) * 1000,
                    fields(key=note.caller, request_id=note.request_id, error=code, param=param),
                )

    def _begin_span(self, method: str) -> telemetry.Span:
        """Begins a trace where the caller sent no span; otherwise the guard has begun one."""
        return (
            telemetry.Span() if telemetry.trace_id() else telemetry.begin(f"/{self._service}/{method}", kind="server")
        )


class Impatience:
    """Cancels the task that is in it for longer than ``limit_s``: its caller does not read."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, task.cancel)

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()


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


def headers_of(context: Context) -> Headers:
    metadata = context.invocation_metadata() or ()

    def values(name: str) -> list[str]:
        return [value if isinstance(value, str) else value.decode("latin-1") for key, value in metadata if key == name]

    return values


def patience_s(context: Context) -> float | None:
    """Seconds that the call may yet last. None: no limit."""
    left = context.time_remaining()
    return None if left is None else max(left, 0.001)
