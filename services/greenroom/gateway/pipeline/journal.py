"""A pool's journal as its gateway reads it: first from where it matters to requests in flight, then the older part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import JournalRecord, Outcome, Undecodable, decode
from greenroom.fabric.log import Log, LogFailed, LogUnavailable, Reader, Record
from greenroom.fabric.topics import JOURNAL

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_CATCH_UP_POLL_S = 0.1
_OLDER_AT_ONCE = 100
"""Records. Other tasks run between two polls."""
_AGAIN_S = 1.0


class JournalReader:
    """Reads from the middle to the end and follows; ``read_older`` reads what is retained from before.

    ``outcome`` is called for every outcome that counts, in the journal's order from the middle on. ``older`` is called
    for each one from before that. A reader that begins in the middle can not judge records that depend on earlier
    claims. ``read_older`` knows those claims, and goes on until both readers agree. So each outcome is told once.
    """

    def __init__(
        self, log: Log, pool: int, *, outcome: Callable[[Outcome], None], older: Callable[[Outcome], None]
    ) -> None:
        self._log = log
        self._pool = pool
        self._outcome = outcome
        self._older = older
        self._fold = JournalFold()
        self._middle = 0
        self._decided_from: int | None = None
        """From this offset on the reader from the middle has judged every record."""
        self.caught_up = asyncio.Event()
        """All records from the middle on that were there at the start have been read."""
        self.reading_older = False
        """Whether records from before the middle are still to be read."""
        self.unreadable = 0
        """Records that could not be read and were passed over; the scheduler writes dead letters of them."""

    async def follow(self, since_ms: float) -> None:
        """For ever, from the first record that was stamped at or after ``since_ms``. Raises LogError."""
        earliest = await self._log.offset_at(JOURNAL, self._pool, 0)
        self._middle = await self._log.offset_at(JOURNAL, self._pool, max(0, int(since_ms)))
        self.reading_older = earliest < self._middle
        async with self._log.reader(JOURNAL, self._pool, start=self._middle) as reader:
            self._fold = JournalFold(reader.position)
            end = await reader.end()
            while True:
                if reader.position >= end:
                    self.caught_up.set()
                for record in await reader.poll(_POLL_S if self.caught_up.is_set() else _CATCH_UP_POLL_S):
                    self._read(record)

    def _read(self, record: Record) -> None:
        content = self._decoded(record)
        if content is None:
            self._fold.skip(record.offset)
            return
        verdict = self._fold.read(record.offset, content)
        if verdict is not Verdict.COUNTS:
            return
        if self._decided_from is None:
            self._decided_from = record.offset
        if isinstance(content, Outcome):
            self._outcome(content)

    async def read_older(self) -> None:
        """Reads all that is retained from before the middle. Call this once it has caught up; ``reading_older`` is true
        until it is done. Records that are deleted meanwhile are skipped: their keys are not retained either. Raises
        LogFailed."""
        while self.reading_older:
            try:
                async with self._log.reader(JOURNAL, self._pool) as reader:
                    self.reading_older = not await self._read_from(reader)
            except LogUnavailable as error:
                _LOG.warning("the journal's older records can not be read now, trying again: %s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _read_from(self, reader: Reader) -> bool:
        """Whether all was read. False: the next record has been deleted. Raises LogUnavailable, LogFailed."""
        try:
            await self._read_older(reader)
        except LogFailed:
            if await self._log.offset_at(JOURNAL, self._pool, 0) <= reader.position:
                raise
            _LOG.info("journal record %d was deleted before it was read: beginning anew", reader.position)
            return False
        _LOG.info("the journal has been read from its oldest record on: all idempotency keys are known")
        return True

    async def _read_older(self, reader: Reader) -> None:
        fold = JournalFold(reader.position)
        while not self._agreed(fold, reader.position):
            for record in await reader.poll(_CATCH_UP_POLL_S, _OLDER_AT_ONCE):
                if self._agreed(fold, record.offset):
                    break
                content = self._decoded(record)
                if content is None:
                    fold.skip(record.offset)
                elif fold.read(record.offset, content) is Verdict.COUNTS and isinstance(content, Outcome):
                    (self._older if record.offset < self._middle else self._outcome)(content)

    def _agreed(self, fold: JournalFold, offset: int) -> bool:
        """Whether ``fold``, which has read all before ``offset``, knows nothing that the reader from the middle does
        not know."""
        if self._decided_from is None and offset >= self._fold.next_offset:
            # That one has read as far, and still can not judge: it goes on with what is known here.
            fold.skip(self._fold.next_offset - 1)
            self._fold, self._decided_from = fold, offset
        return self._decided_from is not None and offset >= self._decided_from

    def _decoded(self, record: Record) -> JournalRecord | None:
        try:
            content: JournalRecord = decode(record.value or b"", JournalRecord)
        except Undecodable as error:
            _LOG.warning("journal record %d can not be read: %s", record.offset, error)
            self.unreadable += 1
            return None
        return content
