"""SLO, priority and timeout of a request: from its body, its headers, and what its key allows."""

from __future__ import annotations

from typing import Protocol

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Slo
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.keys import MAX_PRIORITY
from greenroom.gateway.requests.bodies import SloBody
from greenroom.gateway.requests.call_headers import PRIORITY_HEADER, SLO_HEADERS, CallHeaders


class Urgency(Protocol):
    """The fields of a body that say how soon it is wanted."""

    @property
    def slo(self) -> SloBody | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def timeout(self) -> float | None: ...


def slo_of(body: Urgency, call: CallHeaders) -> Slo:
    """From the body or the headers. Where both say a value, it must be the same. Raises InvalidRequest."""
    if body.slo is None:
        return call.slo
    found: dict[str, float | None] = {}
    for name, header in SLO_HEADERS.items():
        here, there = getattr(body.slo, name), getattr(call.slo, name)
        if here is not None and there is not None and here != there:
            raise InvalidRequest(f"slo.{name} and the header {header} differ; send one of them", param=f"slo.{name}")
        found[name] = there if here is None else here
    return Slo(**found)


def priority_of(body: Urgency, call: CallHeaders) -> int:
    """The priority asked for, at most what the key allows. Absent: 0, or less where the key allows only that.
    Raises InvalidRequest."""
    most = call.caller.limits.max_priority
    asked = _asked_priority(body, call)
    if asked is not None and asked > most:
        raise InvalidRequest(
            f"this key is allowed a priority of at most {most}, not {asked}",
            param="priority" if body.priority is not None else PRIORITY_HEADER,
            code="priority_not_allowed",
        )
    return min(0, most) if asked is None else asked


def _asked_priority(body: Urgency, call: CallHeaders) -> int | None:
    if body.priority is None:
        return call.priority
    if abs(body.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
    if call.priority not in (None, body.priority):
        raise InvalidRequest(f"priority and the header {PRIORITY_HEADER} differ; send one of them", param="priority")
    return body.priority


def timeout_of(body: Urgency, call: CallHeaders, config: GatewayConfig) -> float:
    """Seconds from the request's arrival to its end. Raises InvalidRequest."""
    wanted = config.request_timeout_s if body.timeout is None else body.timeout
    if not 0 < wanted <= config.max_request_timeout_s:
        raise InvalidRequest(
            f"timeout must be above 0 and at most {config.max_request_timeout_s:g} seconds, not {wanted:g}",
            param="timeout",
        )
    return wanted if call.patience_s is None else min(wanted, call.patience_s)
