"""What a reader promises: it reads one partition, from where it is told to, and skips nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from greenroom.fabric.log import LogFailed, Reader
from tests.contract.log.kinds import WAIT_S, Kind, Told, read, topic_on


async def test_it_begins_where_it_is_told_and_follows(kind: Kind) -> None:
    async with topic_on(kind, 2) as log:
        for number in range(6):
            await log.append("things", b"%d" % number, partition=1)
        async with log.reader("things", 1, start=4) as later, log.reader("things", 1) as first:
            assert (first.position, later.position) == (0, 4)
            assert [record.value for record in await read(later, 2)] == [b"4", b"5"]
            assert later.position == 6
            coming = asyncio.create_task(later.poll(WAIT_S))
            await log.append("things", b"6", partition=1)
            await log.append("things", b"other", partition=0)
            assert [record.value for record in await coming] == [b"6"]
            assert [record.offset for record in await read(first, 7, max_records=3)] == list(range(7))


async def test_with_nothing_to_read_it_returns_in_time(kind: Kind) -> None:
    async with topic_on(kind) as log, log.reader("things", 0) as reader:
        began = time.monotonic()
        assert await reader.poll(0.2) == []
        assert 0.15 < time.monotonic() - began < 2.0
        assert await reader.poll(0.0) == []


async def test_the_end_is_behind_every_acknowledged_append(kind: Kind) -> None:
    async with topic_on(kind) as log, kind.connect() as other, log.reader("things", 0) as reader:
        assert await reader.end() == 0
        for _ in range(20):
            position = await other.append("things", b"v")
            assert await reader.end() == position.offset + 1


async def test_the_offset_at_a_time_is_that_of_the_first_record_from_then_on(kind: Kind) -> None:
    async with topic_on(kind) as log:
        assert await log.offset_at("things", 0, 0) == 0
        stamps = []
        for _ in range(4):
            stamps.append((await log.append("things", b"v")).timestamp_ms)
            await asyncio.sleep(0.005)  # so that their stamps differ
        for offset, stamp in enumerate(stamps):
            assert await log.offset_at("things", 0, stamp) == offset
            assert await log.offset_at("things", 0, stamp + 1) == offset + 1
        assert await log.offset_at("things", 0, 0) == 0
        assert await log.offset_at("things", 0, stamps[-1] + 3_600_000) == 4


async def test_what_was_deleted_is_out_of_range_and_the_earliest_moves(kind: Kind) -> None:
    async with topic_on(kind) as log:
        for number in range(10):
            await log.append("things", b"%d" % number)
        await kind.delete_records("things", 0, 6)
        async with log.reader("things", 0) as earliest:
            assert earliest.position == 6
            assert [record.offset for record in await read(earliest, 4)] == [6, 7, 8, 9]
        for start in (3, 11):
            async with log.reader("things", 0, start=start) as reader:
                for _ in range(2):  # it stays so: nothing is skipped by asking again
                    with pytest.raises(LogFailed, match="out of range"):
                        await asyncio.wait_for(_poll_until_it_fails(reader), WAIT_S)


async def _poll_until_it_fails(reader: Reader) -> None:
    while True:
        assert await reader.poll(1.0) == []


async def test_a_partition_that_the_topic_has_not_is_refused(kind: Kind) -> None:
    async with topic_on(kind, 2) as log:
        with pytest.raises(LogFailed, match="2 partitions"):
            async with log.reader("things", 2):
                pass


@pytest.mark.parametrize("how", ["reader", "group"])
async def test_cancelling_a_poll_loses_nothing(kind: Kind, how: str) -> None:
    async with (
        topic_on(kind) as log,
        log.reader("things", 0) if how == "reader" else log.group("things", "g", Told()) as reader,
    ):
        found = []
        for number in range(40):
            polling = asyncio.create_task(reader.poll(WAIT_S))
            await asyncio.sleep(0)
            await log.append("things", b"%d" % number)
            await asyncio.sleep(0.0005 * (number % 5))
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                found += await polling
        found += await read(reader, 40 - len(found)) if len(found) < 40 else []
        assert [record.value for record in found] == [b"%d" % number for number in range(40)]


async def test_a_closed_one_says_so(kind: Kind) -> None:
    async with topic_on(kind) as log:
        async with log.reader("things", 0) as reader:
            pass
        with pytest.raises(LogFailed, match="closed"):
            await reader.poll(0.1)
