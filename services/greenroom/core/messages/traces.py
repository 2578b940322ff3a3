"""Topic ``traces``: the routing of finished sequences. Key: the request's id."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from greenroom.core.messages.codec import Message
from greenroom.core.messages.requests import Name, PoolNumber, RequestId

MAX_REPORTED: Final = 16
"""How many figures one sequence may have."""


class Trace(Message, frozen=True, kw_only=True, tag="trace"):
    """Which experts each row of a sequence was routed to.

    ``experts``: ``dtype``[rows, layers, k], little-endian, C order; indices within the layer. The largest value of
    the dtype stands for no pick. The first ``prompt_rows`` rows are the prompt's. ``num_experts``: of a layer.
    ``tokens``: uint32[rows], little-endian, the id of each row's input; empty where the worker does not tell them, as
    is usual: they are people's text. ``report``: what the worker's expert policy says of the sequence, by name
    (ExpertPolicy.report). ``artifacts``: by kind, when the artifact was made that the policy predicted by at the
    sequence's end, Unix time in ms.
    """

    request_id: RequestId
    pool: PoolNumber
    model: Name
    task_type: Name
    rows: Annotated[int, Meta(ge=0)]
    prompt_rows: Annotated[int, Meta(ge=0)]
    layers: Annotated[int, Meta(ge=1)]
    k: Annotated[int, Meta(ge=1)]
    num_experts: Annotated[int, Meta(ge=1)]
    dtype: Literal["uint8", "uint16"]
    experts: bytes
    tokens: bytes = b""
    worker: Name = ""
    report: Annotated[dict[Name, float], Meta(max_length=MAX_REPORTED)] = field(default_factory=dict)
    artifacts: Annotated[dict[Name, int], Meta(max_length=MAX_REPORTED)] = field(default_factory=dict)
