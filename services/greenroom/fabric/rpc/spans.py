"""How a server's span ends, by OpenTelemetry's conventions for gRPC."""

from __future__ import annotations

import grpc

from greenroom.fabric import telemetry
from greenroom.fabric.rpc.metadata import Context

_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Faults of the server. With any other code the cause is the caller."""
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def told(span: telemetry.Span, code: grpc.StatusCode, word: str = "") -> None:
    """The caller is told ``code``; ``word`` says why."""
    span.set("rpc.response.status_code", code.name)
    if word:
        span.set("code", word)
    if code in _FAULTS:
        span.set("error.type", code.name)
        span.fail(word)


def code_of(context: Context) -> grpc.StatusCode:
    """The code that the handler has set or ended its call with. On the network grpc gives a number, or None for OK."""
    code = context.code()
    if code is None:
        return grpc.StatusCode.OK
    return _BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
