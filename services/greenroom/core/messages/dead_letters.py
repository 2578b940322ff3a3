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


def without_payload(letter: DeadLetter) -> DeadLetter:
    """For one that is too large for its topic: where it was read still says what it was."""
    size = 0 if letter.payload is None else len(letter.payload)
    return DeadLetter(
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        reason=f"{letter.reason} (its {size} bytes were too many for a dead letter)",
        service=letter.service,
        request_id=letter.request_id,
    )
