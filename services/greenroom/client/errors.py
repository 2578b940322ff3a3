"""How a call ends that does not go well."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from greenroom.core.errors import GreenroomError

_NEVER_SENT = re.compile(
    r"failed to connect|connections to all backends failing|connection refused|resolution failed|name resolution"
    r"|empty address list",
    re.IGNORECASE,
)


class ClientError(GreenroomError):
    """Base of them all. ``status``: gRPC's name for it. ``code``: greenroom's stable word, None where no greenroom
    server said it. ``retry_after_s``: when it may go better."""

    def __init__(
        self, message: str, *, status: str, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class BadRequest(ClientError):
    """It can not be served as it stands; the message names the field."""


class Unauthenticated(ClientError):
    """No API key, or one that is not known."""


class NotFound(ClientError):
    """There is no such model."""


class IdempotencyConflict(ClientError):
    """The idempotency key belongs to another request, or to one whose answer is no longer kept (``answer_dropped``)."""


class LimitExceeded(ClientError):
    """A limit of the key or of the server: ``rate_limited``, ``too_many_concurrent``, ``saturated``, ``shed``."""


class TimedOut(ClientError):
    """Not finished in time."""


class Cancelled(ClientError):
    """Somebody ended it."""


class Unavailable(ClientError):
    """No gateway took it, or the connection broke."""


class ServerFailed(ClientError):
    """The generation failed, or the server did."""


_KINDS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: IdempotencyConflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a call that failed. ``sent``: the server may have had it."""

    status: grpc.StatusCode
    message: str
    code: str | None = None
    retry_after_s: float | None = None
    sent: bool = True

    def error(self) -> ClientError:
        kind = _KINDS.get(self.status, ServerFailed)
        return kind(self.message, status=self.status.name, code=self.code, retry_after_s=self.retry_after_s)


def read_failure(error: grpc.RpcError) -> Failure:
    """From what grpc raises, synchronously or not."""
    raised: Any = error
    metadata: Iterable[tuple[str, str | bytes]] = raised.trailing_metadata() or ()
    said = {key: value if isinstance(value, str) else value.decode("utf-8", "replace") for key, value in metadata}
    status, message, code = raised.code(), raised.details() or "", said.get("greenroom-code")
    return Failure(
        status,
        message or f"the call ended with {status.name}",
        code,
        _seconds(said.get("retry-after")),
        sent=not (status is grpc.StatusCode.UNAVAILABLE and code is None and _NEVER_SENT.search(message)),
    )


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
