"""Errors as gRPC statuses: how a server tells them, and how a caller reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from greenroom.core.errors import Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.fabric.rpc.metadata import CODE, RETRY_AFTER, Metadata, value_of

MAX_MESSAGE_CHARS = 1024
"""Statuses travel in headers, which are limited to some kilobytes."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a failed call ends with. ``word`` is stable, for programs; ``message`` is for people."""

    code: grpc.StatusCode
    message: str
    word: str
    retry_after_s: float | None = None

    @property
    def trailing(self) -> Metadata:
        word = ((CODE, self.word),)
        if self.retry_after_s is None:
            return word
        return (*word, (RETRY_AFTER, str(max(1, math.ceil(self.retry_after_s)))))


Shape = Callable[[Exception], Status | None]
"""The status of an error; None for a defect, whose text is not told."""


class Refused(GreenroomError):
    """Raised by a handler that wants its call to end with a certain status."""

    def __init__(self, code: grpc.StatusCode, message: str, *, word: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = Status(code, message, word, retry_after_s)


DEFECT = Status(grpc.StatusCode.INTERNAL, "the server failed on this call; its log says why", "internal_error")


def as_status(error: Exception) -> Status | None:
    """The status of greenroom's own errors. Their texts are meant to be shown."""
    match error:
        case Refused():
            return error.status
        case InvalidRequest():
            return Status(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.code or "invalid_value")
        case Conflict():
            return Status(grpc.StatusCode.ALREADY_EXISTS, str(error), "conflict")
        case Saturated():
            return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), "saturated", error.retry_after_s)
        case GreenroomError():
            return Status(grpc.StatusCode.INTERNAL, str(error), "failed")
        case _:
            return None


def word_of(error: grpc.aio.AioRpcError) -> str | None:
    """The word of the status that a call ended with; None where it did not come from a greenroom server."""
    return value_of(error.trailing_metadata() or (), CODE)


def retry_after_of(error: grpc.aio.AioRpcError) -> float | None:
    """After how many seconds the server said that a retry may succeed; None where it said nothing."""
    given = value_of(error.trailing_metadata() or (), RETRY_AFTER)
    try:
        seconds = float(given) if given is not None else math.nan
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
