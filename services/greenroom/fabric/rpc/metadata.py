"""The metadata that calls carry beside their messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import grpc

from greenroom.fabric import telemetry
from greenroom.fabric.current_request import request_id

REQUEST_ID = "x-request-id"
CODE = "greenroom-code"
RETRY_AFTER = "retry-after"
VALID_ID = re.compile(r"[\x21-\x7e]{1,256}")
"""A request's id that can be sent as metadata."""

Metadata = tuple[tuple[str, str | bytes], ...]
Pairs = Iterable[tuple[str, str | bytes]]
Context = grpc.aio.ServicerContext[Any, Any]
"""What a handler's second argument is annotated with."""


def value_of(metadata: Pairs | None, key: str) -> str | None:
    """The first value of ``key``, as text."""
    for name, value in metadata or ():
        if name == key:
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return None


def received(context: Context) -> Pairs:
    """The metadata that the caller sent. grpc gives pairs, though its types say otherwise."""
    return context.invocation_metadata() or ()


def outgoing(more: Pairs = ()) -> Metadata:
    """``more``, with the id of the present request, if metadata can carry it, and with its trace."""
    metadata = tuple(more)
    present = request_id.get()
    if present and value_of(metadata, REQUEST_ID) is None and VALID_ID.fullmatch(present):
        metadata = (*metadata, (REQUEST_ID, present))
    return telemetry.inject_metadata(metadata)
