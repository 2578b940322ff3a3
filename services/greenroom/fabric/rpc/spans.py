"""How a server's span ends, as OpenTelemetry's conventions for gRPC have it."""

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
"""Of the server; what else a call may end with is its caller's doing."""
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
    """What the handler has set, or ended its call with; on the network a number, or None where it is neither."""
    code = context.code()
    if code is None:
        return grpc.StatusCode.OK
    return _BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
