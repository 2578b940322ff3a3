"""Dead letters of a scheduler: records that it could not read, for people to look at."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque

from greenroom.core.messages import DeadLetter, Undecodable, encode, without_payload
from greenroom.fabric.current_request import working_on
from greenroom.fabric.log import AppendRefused, Headers, Log, LogError, Record
from greenroom.fabric.topics import DEAD_LETTERS

_LOG = logging.getLogger(__name__)
SERVICE = "scheduler"
_APPEND_S = 10.0
_AGAIN_S = 0.5
_TRIES = 3
_MOST = 4096
_MOST_BYTES = 64 * 1024 * 1024
_AT_ONCE = 16


def dead_letter_of(record: Record, error: Undecodable) -> DeadLetter:
    return DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=str(error)[:1000],
        service=SERVICE,
        key=record.key,
        payload=record.value,
        request_id=error.request_id or "",
    )


async def write_dead_letter(log: Log, letter: DeadLetter, headers: Headers = ()) -> None:
    """Returns when it is acknowledged. Where the log refuses it again and again it is written without its payload."""
    with working_on(letter.request_id):
        _LOG.warning("%s goes to the dead letters: %s", _where(letter), letter.reason)
        refused = 0
        while True:
            try:
                await log.append(DEAD_LETTERS, encode(letter), key=letter.key, headers=headers, timeout_s=_APPEND_S)
                return
            except LogError as error:
                _LOG.warning("a dead letter was not written, trying again: %s", error)
                refused += isinstance(error, AppendRefused)
                if refused == _TRIES:
                    letter, headers = without_payload(letter), ()
                await asyncio.sleep(_AGAIN_S)


def _where(letter: DeadLetter) -> str:
    return f"{letter.topic}[{letter.partition}]@{letter.offset}"


def _size(letter: DeadLetter, headers: Headers) -> int:
    return len(letter.payload or b"") + sum(len(name) + len(value) for name, value in headers)


class DeadLetters:
    """Those of unreadable journal records. Reading the journal does not wait for them to be written.

    Each is written at least once: the next scheduler writes again those behind the last claim. The number that may wait
    is bounded. Further ones are only logged; the records themselves stay in the journal.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: deque[tuple[DeadLetter, Headers]] = deque()
        self._bytes = 0
        self._came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, letter: DeadLetter, headers: Headers = ()) -> None:
        size = _size(letter, headers)
        if len(self._waiting) >= _MOST or self._bytes + size > _MOST_BYTES:
            _LOG.error("%s can not be read, and too many wait for the dead letters: %s", _where(letter), letter.reason)
            return
        self._waiting.append((letter, headers))
        self._bytes += size
        self._came.set()

    def forget_before(self, offset: int) -> None:
        """Drop those before the offset: another scheduler has written them."""
        while self._waiting and self._waiting[0][0].offset < offset:
            self._take()

    async def run(self) -> None:
        """Write dead letters as they come, until it is cancelled."""
        while True:
            await self._came.wait()
            await self.write_all()

    async def write_all(self) -> None:
        self._came.clear()
        while self._waiting:
            some = list(itertools.islice(self._waiting, _AT_ONCE))
            await asyncio.gather(*(write_dead_letter(self._log, letter, headers) for letter, headers in some))
            for _ in some:
                self._take()

    def _take(self) -> None:
        self._bytes -= _size(*self._waiting.popleft())
