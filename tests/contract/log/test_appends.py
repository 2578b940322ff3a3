"""What an append promises."""

from __future__ import annotations

import asyncio
import time

import pytest

from greenroom.fabric.log import AppendRefused, LogFailed
from greenroom.fabric.log.partitioner import partition_of
from tests.contract.log.kinds import Kind, read, topic_on


async def test_records_come_in_the_order_of_their_appends(kind: Kind) -> None:
    async with topic_on(kind) as log, log.reader("things", 0) as reader:
        positions = [await log.append("things", b"%d" % number, key=b"k") for number in range(50)]
        records = await read(reader, 50)
        assert [position.offset for position in positions] == list(range(50))
        assert [(record.offset, record.value) for record in records] == [(n, b"%d" % n) for n in range(50)]
        assert {(record.topic, record.partition, record.key) for record in records} == {("things", 0, b"k")}


async def test_appends_under_way_at_once_keep_their_order(kind: Kind) -> None:
    async with topic_on(kind) as log, log.reader("things", 0) as reader:
        await asyncio.gather(*(log.append("things", b"%d" % number, key=b"k") for number in range(300)))
        assert [record.value for record in await read(reader, 300)] == [b"%d" % number for number in range(300)]


async def test_a_key_has_the_same_partition_on_every_log(kind: Kind) -> None:
    keys = [b"request-%d" % number for number in range(40)]
    async with topic_on(kind, 7) as log:
        for key in keys:
            assert (await log.append("things", b"v", key=key)).partition == partition_of(key, 7)
        assert await log.partitions("things") == 7


async def test_without_a_key_partitions_take_turns_and_a_named_one_is_kept(kind: Kind) -> None:
    async with topic_on(kind, 3) as log:
        assert {(await log.append("things", b"v")).partition for _ in range(3)} == {0, 1, 2}
        assert (await log.append("things", b"v", key=b"k", partition=2)).partition == 2
        with pytest.raises(AppendRefused, match="3 partitions"):
            await log.append("things", b"v", partition=3)


async def test_the_broker_stamps_records_in_the_order_of_their_offsets(kind: Kind) -> None:
    before = int(time.time() * 1000)
    async with topic_on(kind) as log, log.reader("things", 0) as reader:
        positions = [await log.append("things", b"v") for _ in range(5)]
        records = await read(reader, 5)
    after = int(time.time() * 1000)
    stamps = [record.timestamp_ms for record in records]
    assert stamps == [position.timestamp_ms for position in positions]
    assert stamps == sorted(stamps)
    assert before <= stamps[0] <= stamps[-1] <= after


async def test_headers_and_empty_values_come_through(kind: Kind) -> None:
    async with topic_on(kind) as log, log.reader("things", 0) as reader:
        headers = [("traceparent", b"00-1-2-01"), ("traceparent", b"again"), ("empty", b"")]
        await log.append("things", b"", headers=headers)
        (record,) = await read(reader, 1)
        assert (record.key, record.value, list(record.headers)) == (None, b"", headers)


async def test_a_tombstone_needs_a_key_and_is_read_as_one(kind: Kind) -> None:
    async with topic_on(kind, compacted=True) as log, log.reader("things", 0) as reader:
        with pytest.raises(ValueError, match="needs a key"):
            await log.append("things", None)
        with pytest.raises(AppendRefused, match="need a key"):
            await log.append("things", b"v")
        await log.append("things", b"v", key=b"k")
        await log.append("things", None, key=b"k")
        assert [(record.key, record.value) for record in await read(reader, 2)] == [(b"k", b"v"), (b"k", None)]


async def test_a_record_that_is_too_large_is_refused_and_the_next_is_taken(kind: Kind) -> None:
    largest = 100_000
    async with topic_on(kind, max_message_bytes=largest) as log, log.reader("things", 0) as reader:
        with pytest.raises(AppendRefused, match="too large"):
            await log.append("things", bytes(largest))
        await log.append("things", bytes(largest - 200), key=b"nearly")
        await log.append("things", b"small")
        assert [len(record.value or b"") for record in await read(reader, 2)] == [largest - 200, 5]


async def test_large_records_come_through(kind: Kind) -> None:
    size = 9 * 1024 * 1024
    async with topic_on(kind, max_message_bytes=size + 1000) as log, log.reader("things", 0) as reader:
        for number in range(3):
            await log.append("things", bytes([number]) * size)
        for number, record in enumerate(await read(reader, 3)):
            assert record.value == bytes([number]) * size


async def test_a_topic_that_is_not_there_is_not_made_up(kind: Kind) -> None:
    async with kind.connect() as log:
        with pytest.raises(LogFailed, match="no topic"):
            await log.append("nothing", b"v")
        with pytest.raises(LogFailed, match="no topic"):
            await log.partitions("nothing")
        with pytest.raises(LogFailed, match="no topic"):
            async with log.reader("nothing", 0):
                pass
