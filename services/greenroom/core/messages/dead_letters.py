"""Topic ``dead-letters``: what could not be read or not be done, as it came, with the reason."""

from __future__ import annotations

from greenroom.core.messages.codec import Message


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead-letter"):
    """``topic``, ``partition``, ``offset``: where it was read; ``key`` and ``payload``: as they were there."""

    topic: str
    partition: int
    offset: int
    reason: str
    service: str
    key: bytes | None = None
    payload: bytes | None = None
    request_id: str = ""
