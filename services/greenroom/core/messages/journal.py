"""Topic ``journal``: claims, losses and outcomes. One partition a pool, written by its schedulers only.

``greenroom.core.journal`` decides what counts. Key: the request's id; for a claim, the scheduler's instance.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.messages.codec import Message
from greenroom.core.messages.requests import Name, RequestId, TokenId

Epoch = Annotated[int, Meta(ge=0)]


class TokenLogprobArrays(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of all tokens of a request, packed: little-endian, C order.

    ``chosen``: float32[n]. ``top_ids``: int32[n, k] and ``top``: float32[n, k], best first.
    """

    chosen: bytes
    top_ids: bytes
    top: bytes
    k: Annotated[int, Meta(ge=0, le=1024)]


class Claim(Message, frozen=True, kw_only=True, tag="claim"):
    """A scheduler takes the pool over, or goes on holding it. ``read_to``: the offset before which it has read the
    journal. The claim stands if no other standing claim lies between there and itself. Its offset is the epoch."""

    scheduler: Name
    read_to: Annotated[int, Meta(ge=0)]


class Lost(Message, frozen=True, kw_only=True, tag="lost"):
    """A worker was lost under these attempts. Written before their requests are attempted anew. ``unsure``: one of them
    may have ended it, and nobody knows which."""

    epoch: Epoch
    worker: Name
    attempts: tuple[tuple[RequestId, Attempt], ...]
    unsure: bool = False


class Outcome(Message, frozen=True, kw_only=True, tag="outcome"):
    """The end of a request. ``token_ids``: all generated tokens, where it came to its own end (stop, length).
    ``digest``, ``keyed``: the request's.

    ``attempt``: the one that generated it, None where none did. ``queue_ms``: from acceptance to the start of that
    attempt. ``approximated``: of all choices of experts for its tokens in that attempt, one a layer, the share in which
    the router was kept from its own choice; 0 where the request did not come to its own end. ``outputs``: of an
    inference that came to its own end, which has no tokens. ``invalid``: it failed since no worker can ever serve it as
    it stands. ``prompt_logprobs``: of the prompt's tokens from the second on, where they were asked for.
    """

    epoch: Epoch
    request_id: RequestId
    reason: FinishReason
    message: Annotated[str, Meta(max_length=4096)] = ""
    token_ids: tuple[TokenId, ...] = ()
    logprobs: TokenLogprobArrays | None = None
    attempt: Attempt | None = None
    digest: Annotated[bytes, Meta(max_length=64)] = b""
    keyed: bool = False
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    task_type: Name = ""
    worker: Name = ""
    queue_ms: Annotated[float, Meta(ge=0)] = 0.0
    approximated: Annotated[float, Meta(ge=0, le=1)] = 0.0
    outputs: InferenceOutputs | None = None
    invalid: bool = False
    prompt_logprobs: TokenLogprobArrays | None = None


JournalRecord = Claim | Lost | Outcome
