"""Which predictor a worker asks, and how a failed call is described."""

from __future__ import annotations

from typing import Protocol

import grpc

from greenroom.core.messages import Member, MemberKind


class Predictors(Protocol):
    """The predictors that are here; fabric's directory."""

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]: ...


def address_of(given: str | None, members: Predictors) -> str:
    """The ``given`` address, else that of an announced predictor. Raises LookupError where none is announced."""
    if given is not None:
        return given
    here = [member for member in members.of(MemberKind.PREDICTOR) if not member.draining]
    if not here:
        raise LookupError("no predictor has announced itself")
    return min(here, key=lambda member: member.instance).address


def said(error: BaseException) -> str:
    """The error as a log line says it."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
