"""What a call says beside its body: who calls, under which id, how soon it is wanted. HTTP headers or RPC metadata."""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Slo
from greenroom.gateway.doors.doorkeeper import ANYONE, Caller
from greenroom.gateway.doors.keys import MAX_PRIORITY

SLO_HEADERS = {"ttft_ms": "x-slo-ttft-ms", "tpot_ms": "x-slo-tpot-ms", "e2e_ms": "x-slo-e2e-ms"}
PRIORITY_HEADER = "x-priority"
IDEMPOTENCY_HEADER = "idempotency-key"
VISIBLE = re.compile(r"[\x21-\x7e]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,24}(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?")
_PRIORITY = re.compile(r"-?[0-9]{1,3}")
_ID = re.compile(r"(?:[a-z]+-)?([0-9a-f]{40})(?:-([0-9]{1,4}))?")
_TAG_CHARS = 8
NO_SLO = Slo()
Headers = Callable[[str], Sequence[str]]
"""From a header's name in lower case to all its values. Empty where it was not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeaders:
    """What the headers of one call say. ``base``: the ids of its sequences are made from it. ``keyed``: ``base`` comes
    from an idempotency key. ``patience_s``: how long the call may last, where its transport says so."""

    base: str
    caller: Caller = ANYONE
    keyed: bool = False
    slo: Slo = NO_SLO
    priority: int | None = None
    patience_s: float | None = None


def call_headers(headers: Headers, caller: Caller, *, patience_s: float | None = None) -> CallHeaders:
    """Raises InvalidRequest, naming the header."""
    key = _one(headers, IDEMPOTENCY_HEADER)
    if key is not None and not VISIBLE.fullmatch(key):
        raise InvalidRequest(
            "the header Idempotency-Key takes 1 to 128 visible ASCII characters",
            param=IDEMPOTENCY_HEADER,
            code="invalid_idempotency_key",
        )
    priority = _one(headers, PRIORITY_HEADER)
    if priority is not None and not (_PRIORITY.fullmatch(priority) and abs(int(priority)) <= MAX_PRIORITY):
        raise InvalidRequest(
            f"the header {PRIORITY_HEADER} takes a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
            param=PRIORITY_HEADER,
        )
    return CallHeaders(
        base=base_id(caller.name, key),
        caller=caller,
        keyed=key is not None,
        slo=Slo(**{name: _milliseconds(headers, header) for name, header in SLO_HEADERS.items()}),
        priority=None if priority is None else int(priority),
        patience_s=patience_s,
    )


def base_id(tenant: str, key: str | None) -> str:
    """An id of 40 hex digits. Every gateway makes the same one of the same tenant and idempotency key.

    The first 8 digits are the tenant's, so that no other tenant can end the request by its id.
    """
    if key is None:
        return _tag(tenant) + uuid.uuid4().hex
    digest = hashlib.blake2b(f"{len(tenant)}:{tenant}:{key}".encode(), digest_size=16, person=b"idempotency")
    return _tag(tenant) + digest.hexdigest()


def owned_id(given: str, tenant: str) -> tuple[str, int] | None:
    """Base and number of a sequence, from the reply's id or the sequence's own. None where it is not an id of this
    tenant's."""
    match = _ID.fullmatch(given)
    if match is None or not match[1].startswith(_tag(tenant)):
        return None
    return match[1], int(match[2] or 0)


def _tag(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=_TAG_CHARS // 2, person=b"tenant").hexdigest()


def _milliseconds(headers: Headers, name: str) -> float | None:
    text = _one(headers, name)
    if text is None:
        return None
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"the header {name} takes a number of milliseconds above 0, such as 250", param=name)
    return value


def _one(headers: Headers, name: str) -> str | None:
    values = headers(name)
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} was sent {len(values)} times; send it once", param=name)
    return values[0].strip(" \t") if values else None
