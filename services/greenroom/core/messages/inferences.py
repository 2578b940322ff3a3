"""Topic ``requests``: what gateways accepted for a collaboration of experts. Key: the request's id."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from greenroom.core.generation import Slo
from greenroom.core.inference import InferenceInput
from greenroom.core.messages.codec import Message
from greenroom.core.messages.requests import Name, PoolNumber, RequestId

MAX_INPUTS: Final = 16
MAX_PARAMETER: Final = 200


class Inference(Message, frozen=True, kw_only=True, tag="inference"):
    """One thing to judge (a call with a batch of n is n of them).

    ``inputs``: as they came. ``parameter``: the router's value; None where a model routes. Every other field is as in
    Request.
    """

    request_id: RequestId
    pool: PoolNumber
    model: Name
    inputs: Annotated[tuple[InferenceInput, ...], Meta(min_length=1, max_length=MAX_INPUTS)]
    accepted_ms: Annotated[int, Meta(ge=0)]
    deadline_ms: Annotated[int, Meta(ge=0)]
    parameter: Annotated[str, Meta(max_length=MAX_PARAMETER)] | None = None
    tenant: Name = ""
    keyed: bool = False
    digest: Annotated[bytes, Meta(max_length=64)] = b""
    slo: Slo = Slo()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    reply_to: Name | None = None
