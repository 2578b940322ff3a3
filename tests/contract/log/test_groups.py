"""What a group promises: each partition has one reader, and what is not committed is read again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import pytest

from greenroom.fabric.log import GroupConsumer, LogFailed, Record
from tests.contract.log.kinds import WAIT_S, Kind, Told, read, topic_on, until_held
from tests.waiting import until


async def test_it_begins_at_the_earliest_and_what_is_not_committed_is_read_again(kind: Kind) -> None:
    async with topic_on(kind) as log:
        for number in range(6):
            await log.append("things", b"%d" % number)
        assert await log.committed("things", "g", 0) is None
        for first, upto in ((0, 2), (2, 5), (5, 5), (5, 6)):
            told = Told()
            async with log.group("things", "g", told) as consumer:
                assert consumer.assignment == {0}
                assert told.held == {0: first}
                assert [record.offset for record in await read(consumer, 6 - first)] == list(range(first, 6))
                assert await consumer.commit({0: upto})
            assert await log.committed("things", "g", 0) == upto
        async with log.group("things", "another", Told()) as consumer:
            assert len(await read(consumer, 6)) == 6


async def test_closing_it_revokes_what_it_held_and_lets_it_commit_until_then(kind: Kind) -> None:
    class Last(Told):
        async def revoked(self, partitions: Sequence[int]) -> None:
            await super().revoked(partitions)
            committed.append(await consumer.commit({0: 1}))

    committed: list[bool] = []
    async with topic_on(kind) as log:
        await log.append("things", b"v")
        told = Last()
        consumer = log.group("things", "g", told)
        async with consumer:
            await read(consumer, 1)
        assert [what for what, _ in told.history] == ["assigned", "revoked"]
        assert committed == [True]
        assert await log.committed("things", "g", 0) == 1
        assert consumer.assignment == frozenset()
        with pytest.raises(LogFailed, match="closed"):
            await consumer.poll(0.1)


async def test_commits_do_not_go_back(kind: Kind) -> None:
    async with topic_on(kind) as log:
        for number in range(9):
            await log.append("things", b"%d" % number)
        async with log.group("things", "g", Told()) as consumer:
            await read(consumer, 9)
            assert await consumer.commit({0: 8})
            assert await consumer.commit({0: 3})
            assert await log.committed("things", "g", 0) == 8
        async with log.group("things", "g", Told()) as consumer:
            assert await consumer.commit({0: 2})
        assert await log.committed("things", "g", 0) == 8


async def test_only_a_holder_can_commit(kind: Kind) -> None:
    async with topic_on(kind, 2) as log, kind.connect() as other:
        for partition in (0, 1):
            await log.append("things", b"v", partition=partition)
        async with log.group("things", "g", Told()) as first:
            await read(first, 2)
            async with other.group("things", "g", Told()) as second:
                await until_held(first, 1)
                await until_held(second, 1)
                (mine,), (theirs,) = first.assignment, second.assignment
                assert not await first.commit({theirs: 1})
                assert not await first.commit({mine: 1, theirs: 1})
                assert await second.commit({theirs: 1})
        assert await log.committed("things", "g", theirs) == 1
        assert await log.committed("things", "g", mine) is None


async def test_two_share_the_partitions_and_a_third_takes_over(kind: Kind) -> None:
    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(topic_on(kind, 4))
        told = [Told() for _ in range(3)]
        consumers = []
        for one in told[:2]:
            connection = await stack.enter_async_context(kind.connect())
            consumers.append(await stack.enter_async_context(connection.group("things", "g", one)))
        for consumer in consumers:
            await until_held(consumer, 2)
        assert consumers[0].assignment.isdisjoint(consumers[1].assignment)
        for partition in range(4):
            await log.append("things", b"before", partition=partition)
        for consumer in consumers:
            records = await read(consumer, 2)
            assert {record.partition for record in records} == consumer.assignment
            assert await consumer.commit({record.partition: record.offset + 1 for record in records})
        async with kind.connect() as third, third.group("things", "g", told[2]) as consumer:
            await consumers[0].__aexit__(None, None, None)
            await consumers[1].__aexit__(None, None, None)
            await until_held(consumer, 4)
            assert told[2].held == dict.fromkeys(range(4), 1)
            await log.append("things", b"after", partition=3)
            (record,) = await read(consumer, 1)
            assert record.value == b"after"
        for one in told:  # what was given was taken back before anything was given again
            assert [what for what, _ in one.history] == ["assigned", "revoked"] * (len(one.history) // 2)


async def test_a_member_without_partitions_is_one_all_the_same(kind: Kind) -> None:
    async with topic_on(kind) as log, kind.connect() as other:
        active, standby = Told(), Told()
        async with log.group("things", "g", active) as first, other.group("things", "g", standby) as second:
            await until(lambda: len(first.assignment | second.assignment) == 1)
            holder, waiting = (first, second) if first.assignment else (second, first)
            assert await waiting.poll(0.1) == []
            await log.append("things", b"v")
            assert len(await read(holder, 1)) == 1
            await holder.__aexit__(None, None, None)
            await until_held(waiting, 1)
            assert len(await read(waiting, 1)) == 1  # it was not committed


async def test_pausing_holds_across_a_rebalance_and_hinders_no_other(kind: Kind) -> None:
    async with topic_on(kind, 2) as log, kind.connect() as other, log.group("things", "g", Told()) as consumer:
        consumer.pause([0])
        for partition in (0, 1):
            await log.append("things", b"one", partition=partition)
        assert [record.partition for record in await read(consumer, 1)] == [1]
        assert await consumer.commit({1: 1})
        async with other.group("things", "g", Told()) as second:
            await until_held(second, 1)
        await until_held(consumer, 2)
        await log.append("things", b"two", partition=1)
        assert [record.partition for record in await read(consumer, 1)] == [1]
        assert await consumer.poll(0.3) == []
        consumer.resume([0])
        assert [(record.partition, record.value) for record in await read(consumer, 1)] == [(0, b"one")]


async def test_a_paused_partition_gives_nothing_that_was_fetched_before(kind: Kind) -> None:
    async with topic_on(kind) as log, log.group("things", "g", Told()) as consumer:
        for number in range(20):
            await log.append("things", b"%d" % number)
        assert [record.offset for record in await read(consumer, 5, max_records=5)] == list(range(5))
        consumer.pause([0])
        assert await consumer.poll(0.2) == []
        consumer.resume([0])
        assert [record.offset for record in await read(consumer, 15)] == list(range(5, 20))


async def test_nothing_is_given_before_assigned_has_returned(kind: Kind) -> None:
    class Slow(Told):
        async def assigned(self, partitions: Mapping[int, int]) -> None:
            await asyncio.sleep(0.3)  # the thing under test: a user that takes its time
            await super().assigned(partitions)

    async with topic_on(kind) as log, kind.connect() as other:
        await log.append("things", b"v")
        told = Slow()
        async with log.group("things", "g", told) as consumer:
            assert told.held == {0: 0}
            async with other.group("things", "g", Told()):
                pass
            async with asyncio.timeout(WAIT_S):
                records: list[Record] = []
                while not records or len(told.history) < 3:  # it is not committed: it comes again each time
                    records = await consumer.poll(0.05)
                    assert told.held or not records
            assert [record.offset for record in records] == [0]


async def test_a_slow_user_stays_a_member(kind: Kind) -> None:
    """It does not poll for longer than the session, while another waits for its partition."""
    async with topic_on(kind) as log, kind.connect() as other:
        told = Told()
        async with log.group("things", "g", told) as slow, other.group("things", "g", Told()) as standby:
            await until(lambda: len(slow.assignment | standby.assignment) == 1)
            holder, waiting = (slow, standby) if slow.assignment else (standby, slow)
            await log.append("things", b"v")
            await read(holder, 1)
            assert await waiting.poll(1.5 * kind.session_s) == []
            assert await holder.commit({0: 1})
            assert holder.assignment == {0}


async def test_a_committed_offset_that_is_gone_is_fatal(kind: Kind) -> None:
    async with topic_on(kind) as log:
        for number in range(5):
            await log.append("things", b"%d" % number)
        async with log.group("things", "g", Told()) as consumer:
            await read(consumer, 5)
            assert await consumer.commit({0: 2})
        await kind.delete_records("things", 0, 4)
        async with log.group("things", "g", Told()) as consumer:
            with pytest.raises(LogFailed, match="out of range"):
                await asyncio.wait_for(_until_it_fails(consumer), WAIT_S)
        async with log.group("things", "new", Told()) as consumer:
            assert [record.offset for record in await read(consumer, 1)] == [4]


async def _until_it_fails(consumer: GroupConsumer) -> None:
    while True:
        assert await consumer.poll(1.0) == []


async def test_what_its_user_raises_is_not_lost(kind: Kind) -> None:
    class Broken(Told):
        async def assigned(self, partitions: Mapping[int, int]) -> None:
            raise RuntimeError("out of order")

    async with topic_on(kind) as log:
        with pytest.raises(LogFailed, match="out of order"):
            async with log.group("things", "g", Broken()) as consumer:
                await consumer.poll(1.0)


async def test_prefixes_keep_groups_and_topics_apart(kind: Kind) -> None:
    async with topic_on(kind) as log:
        await log.append("things", b"ours")
        async with log.group("things", "g", Told()) as consumer:
            await read(consumer, 1)
            assert await consumer.commit({0: 1})
        kind.prefix += "other."
        async with topic_on(kind) as other, other.group("things", "g", Told()) as consumer:
            assert await other.committed("things", "g", 0) is None
            await other.append("things", b"theirs")
            (record,) = await read(consumer, 1)
            assert (record.topic, record.value) == ("things", b"theirs")
