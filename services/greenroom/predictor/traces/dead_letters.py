"""Traces that can not be read go to the dead letters, for people to look at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from greenroom.core.messages import DeadLetter, Undecodable, encode, without_payload
from greenroom.fabric.log import AppendRefused, Log, LogError, LogFailed, Record
from greenroom.fabric.topics import DEAD_LETTERS
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.traces.counts import BadTrace

SERVICE = "predictor"
MAX_REASON_CHARS = 1000
_FIELD = b"tokens"
_LOG = logging.getLogger(__name__)


def dead_letter_of(record: Record, error: Undecodable | BadTrace) -> DeadLetter:
    """As the record came, but for its tokens: they are people's text, and dead letters are kept for long."""
    payload, left_out = without_tokens(record.value)
    return DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=f"{error}{left_out}"[:MAX_REASON_CHARS],
        service=SERVICE,
        key=record.key,
        payload=payload,
        request_id=(error.request_id or "") if isinstance(error, Undecodable) else "",
    )


def without_tokens(payload: bytes | None) -> tuple[bytes | None, str]:
    """The payload of a trace without the field ``tokens``, and what to say of it. They may lie anywhere behind that
    word: where it is elsewhere than as the name of a field of a map, all is left out."""
    if payload is None or _FIELD not in payload:
        return payload, ""
    try:
        fields = msgspec.msgpack.decode(payload)
        if isinstance(fields, dict):
            told = fields.pop(_FIELD.decode(), True)
            rest = msgspec.msgpack.encode(fields)  # anew: nothing is left of a field that came twice
            if _FIELD not in rest:
                empty = not told and payload.count(_FIELD) == 1
                return (payload, "") if empty else (rest, " (its tokens are left out)")
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
        pass
    return None, f" (its {len(payload)} bytes are left out, as some may be tokens)"


class DeadLetterWriter:
    """Tries again until a dead letter is written, from ``retry_s`` on with longer and longer pauses, at most
    ``max_retry_s``. Where the log refuses it again and again it is written without its payload.

    ``tell``: called with what hinders it, and with None when nothing does any more.
    """

    def __init__(
        self,
        log: Log,
        metrics: PredictorMetrics,
        *,
        append_timeout_s: float,
        retry_s: float,
        max_retry_s: float,
        tell: Callable[[str | None], None],
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._append_timeout_s = append_timeout_s
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._tell = tell

    async def write(self, letter: DeadLetter) -> None:
        """Returns when it is acknowledged. Raises LogFailed."""
        _LOG.warning(
            "%s[%d]@%d goes to the dead letters: %s", letter.topic, letter.partition, letter.offset, letter.reason
        )
        wait_s, refused = self._retry_s, 0
        while True:
            try:
                await self._log.append(DEAD_LETTERS, encode(letter), key=letter.key, timeout_s=self._append_timeout_s)
            except LogFailed:
                raise
            except LogError as problem:
                self._tell(f"the log takes no dead letters: {problem}")
                self._metrics.retries.inc()
                refused += isinstance(problem, AppendRefused)
                if refused == 2 and letter.payload is not None:
                    letter = without_payload(letter)
                await asyncio.sleep(wait_s)
                wait_s = min(self._max_retry_s, wait_s * 2)
            else:
                self._tell(None)
                self._metrics.dead_letters.inc()
                return
