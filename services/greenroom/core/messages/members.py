"""Topic ``members``, compacted: the instances that are here, with their addresses. Key: the instance; no value: it has
left."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from greenroom.core.collaboration import CollaborationCard
from greenroom.core.messages.codec import Message
from greenroom.core.messages.requests import Name, PoolNumber, TokenId


class MemberKind(StrEnum):
    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREDICTOR = "predictor"
    WORKER = "worker"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a worker serves. ``text_digest``: of the tokenizer's and template's files, which a gateway must
    share; ``digest``: of the weights too, which the workers of a pool must share. Lengths are in tokens.

    ``collaboration``: it is one of whole models, which has no tokens: the lengths are the least allowed, and mean
    nothing."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    digest: str
    text_digest: str
    max_model_len: Annotated[int, Meta(ge=2)]
    vocab_size: Annotated[int, Meta(ge=1)]
    eos_token_ids: tuple[TokenId, ...] = ()
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0
    created: Annotated[int, Meta(ge=0)] = 0
    collaboration: CollaborationCard | None = None


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """How full a pool's scheduler is; gateways refuse requests by it. ``wait_ms``: that a new request would wait."""

    waiting: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=0)]
    running: Annotated[int, Meta(ge=0)] = 0
    wait_ms: Annotated[float, Meta(ge=0)] = 0.0


class Member(Message, frozen=True, kw_only=True, tag="member"):
    """One instance of a service, announced again every third of ``ttl_ms``. An instance whose record is older than
    ``ttl_ms`` has died. ``address``: host:port of its gRPC server. A process that restarts is another instance.
    ``machine``: what a worker computes on (``machine_name``); empty where that does not matter, or is not known."""

    member: MemberKind
    instance: Annotated[str, Meta(min_length=1, max_length=256)]
    address: Name
    ttl_ms: Annotated[int, Meta(gt=0)]
    pool: PoolNumber = 0
    draining: bool = False
    model: ModelCard | None = None
    depth: QueueDepth | None = None
    machine: Annotated[str, Meta(max_length=256)] = ""
