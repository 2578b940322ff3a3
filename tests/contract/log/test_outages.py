"""What only a real broker can do: die, come back on its data, fall silent, ask for a password."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from greenroom.fabric.log import (
    AppendNotSent,
    AppendRefused,
    AppendUnknown,
    GroupConsumer,
    Log,
    LogConfig,
    LogUnavailable,
    Reader,
)
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from tests.contract.log.kinds import WAIT_S, Kafka, Told, read, topic_on, until_held
from tests.kafka.broker import PASSWORD, USER, Broker
from tests.waiting import until

_RETRY_S = 0.05


@pytest.fixture
def kafka(mortal_broker: Broker) -> Kafka:
    return Kafka(mortal_broker)


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
async def test_everything_goes_on_when_the_broker_comes_back_on_its_data(kafka: Kafka, how: str) -> None:
    """Appends, a group and a reader are under way. What was acknowledged is there; what is there, is read once."""
    acknowledged: set[bytes] = set()
    unknown: set[bytes] = set()
    enough, stopping = asyncio.Event(), asyncio.Event()

    async def append() -> None:
        for number in itertools.count():
            if enough.is_set():
                return
            value = b"%d" % number
            try:
                await log.append("things", value, timeout_s=2.0)
                acknowledged.add(value)
            except AppendUnknown:
                unknown.add(value)
            except AppendNotSent:
                await asyncio.sleep(0.05)

    async def follow(source: Reader | GroupConsumer, into: list[tuple[int, bytes | None]]) -> None:
        while not stopping.is_set():
            into += [(record.offset, record.value) for record in await source.poll(0.2)]

    async def until_acknowledged(count: int) -> None:
        await until(lambda: len(acknowledged) >= count, within_s=3 * WAIT_S)

    def all_read(end: int) -> bool:
        return all(read and read[-1][0] >= end - 1 for read in (by_reader, by_group))

    async with topic_on(kafka) as log, log.reader("things", 0) as reader, log.group("things", "g", Told()) as consumer:
        by_reader: list[tuple[int, bytes | None]] = []
        by_group: list[tuple[int, bytes | None]] = []
        async with asyncio.TaskGroup() as tasks:
            appending = tasks.create_task(append())
            tasks.create_task(follow(reader, by_reader))
            tasks.create_task(follow(consumer, by_group))
            await until_acknowledged(100)
            assert await consumer.commit({0: 50})
            await asyncio.to_thread(getattr(kafka.broker, how))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(kafka.broker.start)
            await until_acknowledged(len(acknowledged) + 100)
            enough.set()
            await appending
            end = await reader.end()
            await until(lambda: all_read(end), within_s=3 * WAIT_S)
            await until_committed(consumer, {0: end})
            stopping.set()
        assert [offset for offset, _ in by_reader] == list(range(len(by_reader)))
        there = [value for _, value in by_reader]
        assert len(set(there)) == len(there)
        assert acknowledged <= set(there) <= acknowledged | unknown
        # The group may have been put together anew, and then read again from what was committed.
        assert dict(by_group).items() <= dict(by_reader).items()
        assert {offset for offset, _ in by_group} >= set(range(end))
        assert await log.committed("things", "g", 0) == end


async def test_no_acknowledgement_is_unknown_and_the_record_may_land_later(kafka: Kafka) -> None:
    async with topic_on(kafka) as log, log.reader("things", 0) as reader:
        await log.append("things", b"first")
        kafka.broker.pause()
        with pytest.raises(AppendUnknown, match="may be there"):
            await log.append("things", b"second", timeout_s=0.5)
        assert not await _connects(kafka)
        kafka.broker.resume()
        await log.append("things", b"third")
        assert [record.value for record in await read(reader, 3)] == [b"first", b"second", b"third"]


async def test_a_commit_that_no_broker_answers_is_refused_and_its_end_is_seen(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request goes on for a while after the caller was told. Nothing is logged as never retrieved."""
    caplog.set_level(logging.CRITICAL, "aiokafka")  # a captured record would keep the task that failed alive
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, told: unseen.append(told))
    kafka.request_timeout_s = 1.0
    async with topic_on(kafka) as log, log.group("things", "g", Told()) as consumer:
        await log.append("things", b"v")
        await read(consumer, 1)
        kafka.broker.pause()
        assert not await consumer.commit({0: 1})
        assert not await consumer.commit({0: 1}), "meanwhile the first one's request has ended"
        kafka.broker.resume()
        await until_committed(consumer, {0: 1})
        assert await log.committed("things", "g", 0) == 1
    gc.collect()
    assert not unseen


@pytest.mark.parametrize("how", ["pause", pytest.param("kill", marks=pytest.mark.full)])
async def test_closing_while_the_broker_is_away_is_quick_and_leaves_nothing_running(kafka: Kafka, how: str) -> None:
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(topic_on(kafka))
        await stack.enter_async_context(log.reader("things", 0))
        consumer = await stack.enter_async_context(log.group("things", "g", Told()))
        await log.append("things", b"v")
        await asyncio.to_thread(getattr(kafka.broker, how))
        waiting = asyncio.create_task(log.append("things", b"v", timeout_s=60.0))
        with pytest.raises(AppendUnknown):
            await log.append("things", b"v", timeout_s=0.2)
        began = time.monotonic()
        await stack.aclose()
        assert time.monotonic() - began < 15.0
    with pytest.raises(AppendUnknown, match="closed"):
        await waiting
    assert consumer.assignment == frozenset()
    assert asyncio.all_tasks() == before


async def _large_ones_before_one_is_refused(log: Log) -> int:
    """How many went through: a broker heeds a setting some time after it has acknowledged it."""
    for large in itertools.count():
        try:
            await log.append("things", bytes(5000))
        except AppendRefused:
            return large
    raise AssertionError


async def test_a_refusal_by_the_broker_fails_one_append_and_not_the_next(kafka: Kafka) -> None:
    """After it, the sequence numbers of an idempotent producer are out of step for good: it must be another."""
    async with topic_on(kafka) as log, log.reader("things", 0) as reader:
        await log.append("things", b"first")
        await kafka.set_config("things", "max.message.bytes", "1000")
        async with asyncio.timeout(WAIT_S):
            large = await _large_ones_before_one_is_refused(log)
        with pytest.raises(AppendRefused, match="refused"):
            await log.append("things", bytes(5000))
        for number in range(3):
            await log.append("things", b"%d" % number)
        values = [record.value for record in await read(reader, 4 + large)]
        assert values == [b"first", *[bytes(5000)] * large, b"0", b"1", b"2"]


@pytest.mark.parametrize("how", ["pause", pytest.param("stop", marks=pytest.mark.full)])
async def test_without_a_broker_a_record_is_not_sent_and_one_too_large_is_refused(kafka: Kafka, how: str) -> None:
    """The first may succeed later, the second never. Neither is there afterwards."""
    async with topic_on(kafka, max_message_bytes=100_000) as log, log.reader("things", 0) as reader:
        await log.append("things", b"first")
        await asyncio.to_thread(getattr(kafka.broker, how))
        # Another process, which knows nothing of the topic yet.
        fresh = KafkaLog(kafka.config())
        fresh._open = True
        try:
            with pytest.raises(AppendNotSent):
                await fresh.append("things", b"not sent", timeout_s=0.5)
        finally:
            await fresh._close()
        # One that has more on its way than is sent at once: what waits for room was never sent.
        large = bytes(90_000)
        appends = [log.append("things", large, timeout_s=1.0) for _ in range(4)]
        ends = await asyncio.gather(*appends, return_exceptions=True)
        unknown = sum(isinstance(end, AppendUnknown) for end in ends)
        assert unknown >= 1
        assert {type(end) for end in ends} <= {AppendUnknown, AppendNotSent}
        assert any(isinstance(end, AppendNotSent) for end in ends)
        with pytest.raises(AppendRefused, match="too large"):
            await log.append("things", bytes(100_001), timeout_s=0.5)
        await asyncio.to_thread(kafka.broker.revive)
        last = await log.append("things", b"last", timeout_s=WAIT_S)
        found = [record.value for record in await read(reader, last.offset + 1)]
        assert found == [b"first", *[large] * (last.offset - 1), b"last"]
        assert last.offset - 1 <= unknown


async def until_committed(consumer: GroupConsumer, positions: dict[int, int]) -> None:
    """Commit until it is taken. Until the consumer has joined its group again it is refused at once."""
    async with asyncio.timeout(WAIT_S):
        while not await consumer.commit(positions):  # noqa: ASYNC110
            await asyncio.sleep(_RETRY_S)


async def _connects(kafka: Kafka) -> bool:
    try:
        async with KafkaLog(dataclasses.replace(kafka.config(), connect_timeout_s=1.0, request_timeout_s=1.0)):
            return True
    except LogUnavailable:
        return False


async def test_a_member_that_slept_through_its_session_can_not_commit_any_more(kafka: Kafka) -> None:
    """Its partition has gone to another, which has committed; what it was about to commit is refused."""

    async def take_over() -> None:
        async with kafka.connect() as log, log.group("things", "g", Told()) as standby:
            await until(asleep.is_set)
            await until_held(standby, 2)
            assert len(await read(standby, 10)) == 10
            assert await standby.commit({0: 4, 1: 4})
            taken.set()
            await until(done.is_set)

    asleep, taken, done = threading.Event(), threading.Event(), threading.Event()
    async with topic_on(kafka, 2) as log, log.group("things", "g", Told()) as sleeper:
        for number in range(10):
            await log.append("things", b"v", partition=number % 2)
        with ThreadPoolExecutor(1) as executor:
            other = asyncio.get_running_loop().run_in_executor(executor, asyncio.run, take_over())
            try:
                await until_held(sleeper, 1)
                (mine,) = sleeper.assignment
                await read(sleeper, 5)
                asleep.set()
                assert taken.wait(3 * WAIT_S)  # this thread's event loop is as good as stopped
                assert not await sleeper.commit({mine: 1})
            finally:
                done.set()
                await other
        assert await log.committed("things", "g", mine) == 4


async def test_a_cluster_that_is_not_there_is_named() -> None:
    config = LogConfig(brokers=("127.0.0.1:1",), connect_timeout_s=0.5)
    with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1:1.*check that the brokers run"):
        async with KafkaLog(config):
            pass


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_tls_with_a_user_and_a_password(kafka_broker: Broker, tmp_path: Path, mechanism: str) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    kind = Kafka(kafka_broker)
    config = LogConfig(
        brokers=(kafka_broker.secure_address,),
        prefix=kind.prefix,
        ca_file=kafka_broker.certificate,
        sasl_mechanism=mechanism,
        sasl_user=USER,
        sasl_password_file=tmp_path / "password",
        heartbeat_s=0.2,
    )
    kind.config = lambda: config  # type: ignore[method-assign]
    async with topic_on(kind) as log, log.group("things", "g", Told()) as consumer, log.reader("things", 0) as reader:
        await log.append("things", b"secret")
        assert [record.value for record in await read(consumer, 1)] == [b"secret"]
        assert [record.value for record in await read(reader, 1)] == [b"secret"]
        assert await consumer.commit({0: 1})


def connected_to(address: str) -> bool:
    port = int(address.rpartition(":")[2])
    return any(one.raddr and one.raddr.port == port for one in psutil.Process().net_connections("tcp"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sasl_password": "a guess"}, "(?i)authentication"),
        ({"ca_file": None, "tls": True}, "(?i)certificate"),
        ({"sasl_mechanism": "SCRAM-SHA-512"}, "(?i)mechanism"),
    ],
)
async def test_a_wrong_secret_says_what_is_wrong(kafka_broker: Broker, change: dict[str, object], reason: str) -> None:
    config = LogConfig(
        brokers=(kafka_broker.secure_address,),
        ca_file=kafka_broker.certificate,
        sasl_mechanism="PLAIN",
        sasl_user=USER,
        sasl_password=PASSWORD,
        connect_timeout_s=1.0,
    )
    with pytest.raises(LogUnavailable, match=reason):
        async with KafkaLog(dataclasses.replace(config, **change)):  # type: ignore[arg-type]
            pass
    # An encrypted connection closes once the broker has said good-bye. A loop that ends before leaves it to others.
    await until(lambda: not connected_to(kafka_broker.secure_address), "its connections are closed")
