"""The journal from the middle on, then from its beginning: each outcome comes once, and counts as for any reader."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import Claim, JournalRecord, Lost, Outcome, encode
from greenroom.fabric.log import LogUnavailable, MemoryBroker, MemoryLog, Record
from greenroom.fabric.log.memory.memory_log import MemoryReader
from greenroom.fabric.topics import JOURNAL, REQUESTS, Topics, all_topics
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.journal import JournalReader
from greenroom.gateway.pipeline.pipeline import Pipeline
from tests.hand_clock import HandClock
from tests.unit.gateway.pipeline.members import Members, worker
from tests.waiting import until


def outcome(name: str, epoch: int, *, keyed: bool = True) -> Outcome:
    return Outcome(epoch=epoch, request_id=name, reason=FinishReason.CANCELLED, keyed=keyed, digest=b"d")


def random_journal(choose: random.Random, length: int) -> list[JournalRecord]:
    """Of several schedulers: claims that stand and claims that do not, outcomes of epochs that hold and are over."""
    records: list[JournalRecord] = []
    claims = [0]
    for offset in range(length):
        if choose.random() < 0.25:
            read_to = max(0, offset - choose.choice([0, 0, 0, 1, 2, 5, 20]))
            records.append(Claim(scheduler=choose.choice("ab"), read_to=read_to))
            claims.append(offset)
        else:
            epoch = claims[-1] if choose.random() < 0.7 else choose.choice(claims)
            records.append(outcome(f"r{choose.randrange(length)}.{offset}", epoch, keyed=choose.random() < 0.5))
    return records


def counting(records: list[JournalRecord]) -> list[str]:
    """The requests whose outcomes count, for a reader of the whole journal."""
    fold = JournalFold()
    found = []
    for offset, record in enumerate(records):
        if fold.read(offset, record) is Verdict.COUNTS and isinstance(record, Outcome):
            found.append(record.request_id)
    return found


class Told:
    """What a reader says, and the log that it reads."""

    def __init__(self, log: MemoryLog, clock: HandClock) -> None:
        self.log = log
        self.clock = clock
        self.stamps: list[float] = []
        self.older: list[str] = []
        self.newer: list[str] = []
        self.reader = JournalReader(
            log,
            0,
            outcome=lambda found: self.newer.append(found.request_id),
            older=lambda found: self.older.append(found.request_id),
        )

    async def append(self, *records: JournalRecord) -> None:
        for record in records:
            self.clock.now += 1.0
            self.stamps.append(self.clock.now * 1000)
            await self.log.append(JOURNAL, encode(record), partition=0)


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    clock = HandClock(1_700_000_000.0)
    async with MemoryLog(MemoryBroker(clock=clock)) as log:
        await log.ensure(all_topics(Topics()))
        yield Told(log, clock)


async def until_read(told: Told, offset: int) -> None:
    await until(lambda: told.reader._fold.next_offset >= offset, "all that was appended has been read")


@pytest.mark.parametrize("seed", range(60))
async def test_a_reader_that_begins_anywhere_agrees_with_one_that_read_all(seed: int, told: Told) -> None:
    choose = random.Random(seed)
    records = random_journal(choose, choose.randrange(1, 60))
    split = choose.randrange(len(records) + 1)
    await told.append(*records[:split])
    since = choose.choice([*told.stamps, told.clock.now * 1000 + 1])
    following = asyncio.create_task(told.reader.follow(since))
    await told.reader.caught_up.wait()
    if choose.random() < 0.5:  # else it comes while the older ones are read
        await told.append(*records[split:])
        await until_read(told, len(records))
    await told.reader.read_older()
    if len(told.stamps) < len(records):
        await told.append(*records[split:])
    await until_read(told, len(records))
    following.cancel()
    assert not told.reader.reading_older
    expected = counting(records)
    assert sorted(told.older + told.newer) == sorted(expected), "each that counts once, and no other"
    middle = next((at for at, stamp in enumerate(told.stamps) if stamp >= since), len(told.stamps))
    assert [int(name.split(".")[1]) < middle for name in told.older] == [True] * len(told.older)


async def test_what_is_deleted_while_it_is_read_is_passed_over(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.gateway.pipeline.journal._OLDER_AT_ONCE", 1)
    await told.append(Claim(scheduler="s", read_to=0), *(outcome(f"r{number}", 0) for number in range(1, 10)))
    await told.append(Claim(scheduler="s", read_to=10), *(outcome(f"r{number}", 10) for number in range(11, 20)))
    following = asyncio.create_task(told.reader.follow(told.clock.now * 1000 + 1))
    await told.reader.caught_up.wait()
    tell = told.reader._older

    def older(found: Outcome) -> None:
        tell(found)
        if found.request_id == "r3":
            told.log.broker.delete_records(JOURNAL, 0, 8)

    told.reader._older = older
    await told.reader.read_older()
    following.cancel()
    assert not told.reader.reading_older
    assert set(told.older) == {f"r{number}" for number in (1, 2, 3, *range(11, 20))}


async def test_a_log_that_does_not_answer_for_a_moment_is_asked_again(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.gateway.pipeline.journal._AGAIN_S", 0.0)
    await told.append(Claim(scheduler="s", read_to=0), *(outcome(f"r{number}", 0) for number in range(1, 4)))
    following = asyncio.create_task(told.reader.follow(told.clock.now * 1000 + 1))
    await told.reader.caught_up.wait()
    enter, away = MemoryReader.__aenter__, [True, True]

    async def entered(reader: MemoryReader) -> MemoryReader:
        if away:
            away.pop()
            raise LogUnavailable("no broker answers")
        return await enter(reader)

    monkeypatch.setattr(MemoryReader, "__aenter__", entered)
    await told.reader.read_older()
    following.cancel()
    assert not away
    assert not told.reader.reading_older
    assert told.older == ["r1", "r2", "r3"]


class SlowBehind(MemoryLog):
    """Gives nothing of the journal from its beginning before ``go`` is set."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.go = asyncio.Event()
        self.read = 0

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> MemoryReader:
        reader = super().reader(topic, partition, start=start)
        poll = reader.poll

        async def gated(timeout_s: float, max_records: int = 500) -> list[Record]:
            if topic == JOURNAL and start is None:
                await self.go.wait()
            records = await poll(timeout_s, max_records)
            self.read += len(records) if topic == JOURNAL else 0
            return records

        reader.poll = gated  # type: ignore[method-assign]
        return reader


@pytest.mark.timeout(30)
async def test_a_start_reads_what_may_matter_and_keys_wait_for_the_rest() -> None:
    clock = HandClock(1_700_000_000.0)
    clock.now = time.time() - 5 * 3600
    async with SlowBehind(MemoryBroker(clock=clock)) as log:
        await log.ensure(all_topics(Topics(request_partitions=1)))

        async def append(record: JournalRecord) -> None:
            await log.append(JOURNAL, encode(record), partition=0)

        await append(Claim(scheduler="s", read_to=0))
        await append(outcome("key", 0))
        for number in range(300):
            await append(outcome(f"old{number}", 0, keyed=False))
        clock.now = time.time()
        await append(Lost(epoch=0, worker="w", attempts=()))
        directory: Any = Members()
        directory.here = [worker("w")]
        pipeline = Pipeline(PipelineConfig(), instance="g", log=log, directory=directory)
        await pipeline.start()
        try:
            assert log.read == 1, "only what is younger than the longest deadline"
            assert pipeline.unready is None

            def ask(request_id: str, *, keyed: bool) -> AsyncIterator[Event]:
                sampling = SamplingParams(max_tokens=1)
                return pipeline.generate(
                    GenerationRequest(
                        request_id=request_id, prompt_ids=(1,), sampling=sampling, keyed=keyed, digest=b"d"
                    )
                )

            with pytest.raises(ApiError) as refused:
                await anext(ask("key", keyed=True))
            assert (refused.value.status, refused.value.code) == (503, "keys_not_read")
            assert int(refused.value.headers["Retry-After"]) >= 1
            waiting = asyncio.ensure_future(anext(ask("plain", keyed=False)))
            async with log.reader(REQUESTS, 0) as requests:
                while not (sent := await requests.poll(0.1)):
                    pass
            assert sent[0].key == b"plain", "it is served meanwhile"
            log.go.set()
            await until(lambda: not pipeline._journal.reading_older, "it has read all that is retained")
            event = await anext(ask("key", keyed=True))
            assert isinstance(event, Finished)
            assert event.reason is FinishReason.CANCELLED
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        finally:
            await pipeline.stop()
