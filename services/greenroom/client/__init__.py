"""A client for other back ends, over gRPC: ``Client`` and ``AsyncClient``.

    from greenroom.client import Client

    with Client("localhost:8001", api_key="grk_...") as client:
        print(client.generate("The opposite of cold is", max_tokens=8).text)
        for part in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
            print(part.text, end="", flush=True)

Several addresses, ``Client(["gateway-a:8001", "gateway-b:8001"])``, are tried in turn where one refuses. A request is
sent again only where it certainly was not taken, or where it has an ``idempotency_key``.
"""

from greenroom.client.aio import AsyncClient, AsyncStream
from greenroom.client.errors import (
    BadRequest,
    Cancelled,
    ClientError,
    IdempotencyConflict,
    LimitExceeded,
    NotFound,
    ServerFailed,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from greenroom.client.settings import Tls
from greenroom.client.sync import Client, Stream
from greenroom.client.types import ModelInfo, Options, Part, Reply, Usage
from greenroom.core.generation import FinishReason, Slo, Token, TokenLogprobs

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Cancelled",
    "Client",
    "ClientError",
    "FinishReason",
    "IdempotencyConflict",
    "LimitExceeded",
    "ModelInfo",
    "NotFound",
    "Options",
    "Part",
    "Reply",
    "ServerFailed",
    "Slo",
    "Stream",
    "TimedOut",
    "Tls",
    "Token",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
