"""msgpack maps with a version and a kind; validated on decode, unknown fields passed over.

A field with a default may be added without a new version: an old reader passes over it, a new one fills it in. Any
other change (a field that goes, changes its type or its meaning, or is required) is a new version. Readers of both
versions must run before the first writer of the new one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from greenroom.core.errors import GreenroomError

SCHEMA_VERSION = 1
MAX_ID_CHARS = 256

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all records. ``v`` is the schema version, and ``kind``, which msgspec writes, the type's tag."""

    v: Literal[1] = 1


class _Head(msgspec.Struct):
    """The part of a record that is read when the rest can not be."""

    v: Any = None
    kind: Any = None
    request_id: Any = None
    pool: Any = None
    request: Any = None
    """A record that carries a request has that request's id and pool."""


class Undecodable(GreenroomError):
    """Bytes that are no record of this version. ``request_id``, ``pool``: where at least these could be read."""

    def __init__(self, reason: str, *, request_id: str | None = None, pool: int | None = None) -> None:
        super().__init__(reason)
        self.request_id = request_id
        self.pool = pool


_encoder = msgspec.msgpack.Encoder()
_heads = msgspec.msgpack.Decoder(_Head)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T] | Any) -> T:
    """``data`` as ``kind``, a Message type or a union of some. Raises Undecodable with the reason."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        decoded: T = decoder.decode(data)
        return decoded
    except (msgspec.MsgspecError, GreenroomError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise _undecodable(data, error) from error


def _undecodable(data: bytes, error: Exception) -> Undecodable:
    try:
        head = _heads.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError):
        return Undecodable(f"not a record: {error}")
    reason = str(error)
    if head.v != SCHEMA_VERSION:
        reason = f"schema version {head.v!r:.40}, this reader knows {SCHEMA_VERSION}"
    request_id, pool = head.request_id, head.pool
    if isinstance(head.request, dict):
        request_id, pool = head.request.get("request_id"), head.request.get("pool")
    readable = isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID_CHARS
    return Undecodable(
        f"{reason} (kind {head.kind!r:.40})",
        request_id=request_id if readable else None,
        pool=pool if isinstance(pool, int) and not isinstance(pool, bool) else None,
    )
