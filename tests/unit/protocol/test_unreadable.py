"""What a scheduler can not read: written down for people, and no request's or pool's undoing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from greenroom.core.clock import SteadyClock
from greenroom.core.messages import Claim, DeadLetter, Undecodable, decode, encode
from greenroom.fabric.log import AppendRefused, Headers, MemoryBroker, MemoryLog, Position
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import LocalDialer
from greenroom.fabric.topics import DEAD_LETTERS, JOURNAL, TASKS, Topics, all_topics
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.scheduler.config import PoolConfig, SchedulerConfig
from greenroom.scheduler.dead_letters import DeadLetters, dead_letter_of, write_dead_letter
from greenroom.scheduler.pool_runner import PoolRunner
from tests.pipeline.troubled_log import TroubledLog, in_turn
from tests.unit.protocol.pool_bench import Bench
from tests.waiting import until

GARBAGE = b"\xc1 can not be read"


async def letters(log: MemoryLog) -> list[DeadLetter]:
    async with log.reader(DEAD_LETTERS, 0) as reader:
        end = await reader.end()
        found: list[DeadLetter] = []
        while reader.position < end:
            found += [decode(record.value or b"", DeadLetter) for record in await reader.poll(1.0)]
    return found


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    async with MemoryLog() as made:
        await made.ensure(all_topics(Topics()))
        yield made


@asynccontextmanager
async def runner(log: MemoryLog) -> AsyncIterator[PoolRunner]:
    """A scheduler that holds the pool."""
    async with Directory(log, look_s=0.01) as directory, LocalDialer() as dialer:
        made = PoolRunner(
            0,
            0,
            instance="s",
            config=SchedulerConfig(pool=PoolConfig(reclaim_ms=300)),
            policy=FcfsPlacement(),
            log=log,
            dialer=dialer,
            directory=directory,
            clock=SteadyClock(),
        )
        running = asyncio.create_task(made.run())
        try:
            await until(lambda: made.pool.epoch >= 0)
            yield made
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def where(found: list[DeadLetter], topic: str) -> list[int]:
    return [letter.offset for letter in found if letter.topic == topic]


async def test_a_journal_record_is_dead_lettered_once_however_many_schedulers_read_it(log: MemoryLog) -> None:
    await log.append(JOURNAL, GARBAGE, partition=0)
    await log.append(JOURNAL, encode(Claim(scheduler="former", read_to=1)), partition=0)
    unseen = await log.append(JOURNAL, GARBAGE, partition=0)
    async with runner(log) as holder:
        await until(lambda: not len(holder._journal_dead_letters))
        assert where(await letters(log), JOURNAL) == [unseen.offset], "the former holder had read the first"
        late = await log.append(JOURNAL, GARBAGE, partition=0)
        await until(lambda: holder.pool.counts["journal_unreadable"] == 3)
        await until(lambda: not len(holder._journal_dead_letters))
        assert where(await letters(log), JOURNAL) == [unseen.offset, late.offset]
        await until(lambda: holder.pool.epoch > late.offset)
    async with runner(log) as successor:
        await until(lambda: successor.pool.counts.get("journal_unreadable") == 3)
        assert where(await letters(log), JOURNAL) == [unseen.offset, late.offset]


async def test_an_unreadable_task_is_dead_lettered_and_its_request_fails(log: MemoryLog) -> None:
    broken = msgspec.msgpack.encode({"v": 9, "kind": "task", "request": {"request_id": "r", "pool": 0}})
    async with runner(log) as holder:
        for value in (GARBAGE, broken):
            position = await log.append(TASKS, value, partition=0)
            async with log.reader(TASKS, 0, start=position.offset) as reader:
                holder.feed((await reader.poll(1.0))[0])
        await until(lambda: holder.position == 2)
        assert holder.pool.counts["outcome_failed"] == 1
    found = await letters(log)
    assert [(letter.offset, letter.request_id, letter.payload) for letter in found] == [
        (0, "", GARBAGE),
        (1, "r", broken),
    ]


def test_an_unreadable_record_of_no_request_holds_nothing_up() -> None:
    bench = Bench()
    bench.do(bench.pool.unreadable(0, None, "noise", bench.now))
    assert bench.pool.tracker.position == 1
    assert bench.pool.counts["task_unreadable"] == 1


def test_an_unreadable_record_of_a_request_that_runs_does_not_end_it() -> None:
    bench = Bench()
    bench.worker()
    bench.task("r")
    assert bench.do(bench.pool.unreadable(1, "r", "noise", bench.now)) == []
    assert bench.pool.entries["r"].stage.value == "placed"


class Refusing(MemoryLog):
    """Takes no record above a size."""

    async def append(self, topic: str, value: bytes | None, **more: object) -> Position:
        if len(value or b"") > 500:
            raise AppendRefused("too large")
        return await super().append(topic, value, **more)  # type: ignore[arg-type]


async def test_what_is_too_large_for_a_dead_letter_is_named_without_its_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("greenroom.scheduler.dead_letters._AGAIN_S", 0.0)
    async with Refusing() as log:
        await log.ensure(all_topics(Topics()))
        position = await log.append(JOURNAL, GARBAGE)
        async with log.reader(JOURNAL, 0) as reader:
            [record] = await reader.poll(1.0)
        letter = msgspec.structs.replace(
            dead_letter_of(record, Undecodable("noise", request_id="r")), payload=b"x" * 1000
        )
        await write_dead_letter(log, letter)
        [written] = await letters(log)
    assert (written.offset, written.payload, written.request_id) == (position.offset, None, "r")
    assert "1000 bytes" in written.reason


async def test_a_dead_letter_that_was_not_sent_keeps_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.scheduler.dead_letters._AGAIN_S", 0.0)
    async with TroubledLog(MemoryBroker(), in_turn(DEAD_LETTERS, *["unsent"] * 5)) as log:
        await log.ensure(all_topics(Topics()))
        await log.append(JOURNAL, GARBAGE)
        async with log.reader(JOURNAL, 0) as reader:
            [record] = await reader.poll(1.0)
        await write_dead_letter(log, dead_letter_of(record, Undecodable("noise")))
        [written] = await letters(log)
    assert written.payload == GARBAGE


async def test_a_dead_letter_has_the_headers_of_what_it_is_about(log: MemoryLog) -> None:
    headers: Headers = [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("other", b"\xff")]
    await log.append(JOURNAL, GARBAGE, partition=0, headers=headers)
    async with runner(log) as holder:
        await until(lambda: holder.pool.counts["journal_unreadable"] == 1)
        await until(lambda: not len(holder._journal_dead_letters))
    async with log.reader(DEAD_LETTERS, 0) as reader:
        [record] = await reader.poll(1.0)
    assert list(record.headers) == headers


def test_headers_of_letters_that_wait_are_bounded_too() -> None:
    waiting = DeadLetters(MemoryLog())
    letter = DeadLetter(topic=JOURNAL, partition=0, offset=0, reason="noise", service="s")
    for offset in range(100):
        waiting.add(msgspec.structs.replace(letter, offset=offset), [("h", b"x" * 999_999)])
    assert len(waiting) == 67
    waiting.forget_before(67)
    assert not len(waiting)
    waiting.add(letter, [("h", b"x" * 60_000_000)])
    assert len(waiting) == 1, "what was forgotten counts no more"


def test_letters_that_wait_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    waiting = DeadLetters(MemoryLog())
    letter = DeadLetter(topic=JOURNAL, partition=0, offset=0, reason="noise", service="s", payload=b"x" * 1_000_000)
    for offset in range(100):
        waiting.add(msgspec.structs.replace(letter, offset=offset))
    assert len(waiting) == 67
    assert "journal[0]@67" in caplog.text
    waiting.forget_before(60)
    assert len(waiting) == 7
