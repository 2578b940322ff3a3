"""Topic ``requests``: the requests that gateways accepted, and their clients' cancels. Key: the request's id."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from greenroom.core.generation import SamplingParams, Slo
from greenroom.core.messages.codec import MAX_ID_CHARS, Message

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
PoolNumber = Annotated[int, Meta(ge=0)]
LARGEST_TOKEN_ID: Final = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=LARGEST_TOKEN_ID)]


class Request(Message, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate (a call for n choices is n of them).

    ``pool``: the partition of ``tasks`` and ``journal`` that the model's pool has. ``prompt``: the text that the
    task type is extracted from; ``prompt_ids``: the tokens to generate from. ``digest``: of all that the client asked,
    to tell another body under the same idempotency key (``keyed``) apart. ``reply_to``: the gateway instance that waits
    for the tokens. ``accepted_ms``, ``deadline_ms``: Unix time in milliseconds.
    """

    request_id: RequestId
    pool: PoolNumber
    model: Name
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    sampling: SamplingParams
    accepted_ms: Annotated[int, Meta(ge=0)]
    deadline_ms: Annotated[int, Meta(ge=0)]
    prompt: str = ""
    tenant: Name = ""
    keyed: bool = False
    digest: Annotated[bytes, Meta(max_length=64)] = b""
    task_type: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    slo: Slo = Slo()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    reply_to: Name | None = None


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """The client wants no more of ``request_id``. A cancel takes the request's own way, so it never overtakes it for
    good."""

    request_id: RequestId
    pool: PoolNumber
    deadline_ms: Annotated[int, Meta(ge=0)]
    reason: Annotated[str, Meta(max_length=1024)] = ""
