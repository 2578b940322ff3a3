"""Which predictor a worker asks, and how it says what went wrong."""

from __future__ import annotations

from typing import Protocol

import grpc

from greenroom.core.messages import Member, MemberKind


class Predictors(Protocol):
    """Who predicts; fabric's directory."""

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]: ...


def address_of(given: str | None, members: Predictors) -> str:
    """The one that is ``given``, else whichever has announced itself. Raises LookupError where none has."""
    if given is not None:
        return given
    here = [member for member in members.of(MemberKind.PREDICTOR) if not member.draining]
    if not here:
        raise LookupError("no predictor has announced itself")
    return min(here, key=lambda member: member.instance).address


def said(error: BaseException) -> str:
    """For the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
