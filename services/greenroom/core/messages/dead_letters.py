"""Topic ``dead-letters``: records that could not be read or served, as they came, with the reason."""

from __future__ import annotations

from greenroom.core.messages.codec import Message


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead-letter"):
    """``topic``, ``partition``, ``offset``: where the record was read; ``key``, ``payload``: as they were there."""

    topic: str
    partition: int
    offset: int
    reason: str
    service: str
    key: bytes | None = None
    payload: bytes | None = None
    request_id: str = ""


def without_payload(letter: DeadLetter) -> DeadLetter:
    """For a letter that is too large for its topic. The position still names the record."""
    size = 0 if letter.payload is None else len(letter.payload)
    return DeadLetter(
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        reason=f"{letter.reason} (its {size} bytes were too many for a dead letter)",
        service=letter.service,
        request_id=letter.request_id,
    )
