"""A cluster's topics are read and written by hand, as a program that we did not write would do it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from greenroom.core.generation import FinishReason, SamplingParams
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import DeadLetter, JournalRecord, Lost, Message, Outcome, Request, decode, encode
from greenroom.fabric.log import LogConfig, Position, Reader, Record
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from tests.integration.cluster import Cluster
from tests.waiting import DEADLINE_S, until_others


async def until(holds: Callable[[], bool], what: str) -> None:
    """Asks beside the event loop."""
    await asyncio.to_thread(until_others, holds, what)


class Journal:
    """Follows a pool's journal from its beginning. ``outcomes`` and ``losses``: those that count, in order.
    ``unreadable``: how many records could not be decoded."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._fold = JournalFold()
        self.outcomes: list[Outcome] = []
        self.losses: list[Lost] = []
        self.unreadable = 0

    def of(self, request_id: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.request_id == request_id]

    async def catch_up(self) -> None:
        end = await self._reader.end()
        while self._reader.position < end:
            self._take(await self._reader.poll(1.0))

    async def outcome(self, wanted: str | Callable[[Outcome], bool], timeout_s: float = DEADLINE_S) -> Outcome:
        """The first one of that request, or that ``wanted`` is true of, waiting for it."""
        seen = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for outcome in self.outcomes[seen:]:
                        if outcome.request_id == wanted if isinstance(wanted, str) else wanted(outcome):
                            return outcome
                    seen = len(self.outcomes)
                    self._take(await self._reader.poll(1.0))
        except TimeoutError:
            raise AssertionError(f"no outcome of {wanted} after {timeout_s:g} s") from None

    def _take(self, records: list[Record]) -> None:
        for record in records:
            try:
                content: JournalRecord = decode(record.value or b"", JournalRecord)
            except Exception:
                self._fold.skip(record.offset)
                self.unreadable += 1
                continue
            if self._fold.read(record.offset, content) is not Verdict.COUNTS:
                continue
            if isinstance(content, Outcome):
                self.outcomes.append(content)
            elif isinstance(content, Lost):
                self.losses.append(content)


class Topics:
    """``journal``: of pool 0, read to where it ended when this was opened."""

    def __init__(self, log: KafkaLog, journal: Journal) -> None:
        self.log = log
        self.journal = journal

    @classmethod
    @asynccontextmanager
    async def of(cls, cluster: Cluster, brokers: str | None = None) -> AsyncIterator[Topics]:
        """At another address of the cluster's broker, where one is given."""
        config = LogConfig(brokers=(brokers or cluster.brokers,), prefix=cluster.prefix)
        async with KafkaLog(config) as log, log.reader("journal", 0) as reader:
            journal = Journal(reader)
            await journal.catch_up()
            yield cls(log, journal)

    async def read(self, topic: str, partition: int = 0, start: int | None = None) -> list[Record]:
        """All from ``start`` to the topic's present end."""
        records: list[Record] = []
        async with self.log.reader(topic, partition, start=start) as reader:
            end = await reader.end()
            while reader.position < end:
                records += await reader.poll(1.0)
        return records

    async def end(self, topic: str, partition: int = 0) -> int:
        async with self.log.reader(topic, partition) as reader:
            return await reader.end()

    async def dead_letters(
        self, enough: Callable[[list[DeadLetter]], bool] = lambda _: True, timeout_s: float = DEADLINE_S
    ) -> list[DeadLetter]:
        """All of them, waiting until they are ``enough``."""
        found: list[DeadLetter] = []
        deadline = time.monotonic() + timeout_s
        async with self.log.reader("dead-letters", 0) as reader:
            end = await reader.end()
            while reader.position < end or not enough(found):
                assert time.monotonic() < deadline, f"{len(found)} dead letters after {timeout_s:g} s: too few"
                found += [decode(record.value or b"", DeadLetter) for record in await reader.poll(1.0)]
        return found

    async def send(self, message: Message, topic: str = "requests") -> Position:
        """Under the key that its request's id is."""
        return await self.log.append(topic, encode(message), key=message.request_id.encode())  # type: ignore[attr-defined]


def request_by_hand(request_id: str | None = None, *, timeout_s: float = 60.0, **fields: Any) -> Request:
    """One for the bundled model, without a client that waits for it."""
    now_ms = int(time.time() * 1000)
    given = {
        "pool": 0,
        "model": "greenroom-understudy",
        "prompt_ids": (1, 7, 8, 9),
        "sampling": SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        "accepted_ms": now_ms,
        "deadline_ms": now_ms + int(timeout_s * 1000),
    }
    return Request(request_id=request_id or f"by-hand-{uuid.uuid4().hex}", **{**given, **fields})


def completed(outcome: Outcome) -> bool:
    return outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
