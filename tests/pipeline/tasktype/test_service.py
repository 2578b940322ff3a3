"""Requests in, tasks out: nothing lost, in order within a key, committed no further than done."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.messages import Cancel, DeadLetter, Rejected, Task, decode, encode
from greenroom.fabric.log import LogFailed
from greenroom.fabric.log.memory.memory_log import MemoryLog
from greenroom.tasktype import TaskTypeConfig, TaskTypeMetrics, TaskTypeService
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from tests.pipeline.tasktype.conftest import CONFIG, DEADLINE_S, PARTITIONS, POOLS, Running, World, request
from tests.pipeline.troubled_log import TroubledLog, in_turn, no_trouble


async def test_requests_become_tasks_of_their_pool(world: World) -> None:
    running = await world.start()
    await world.send(request(0))
    await world.send(request(1, prompt="Is this review positive or negative?"))
    await world.send(request(2, task_type="haiku"))
    await world.send(Cancel(request_id="r1", pool=1, deadline_ms=9))
    zero = await world.tasks(0, 2)
    one = await world.tasks(1, 2)
    assert {(task.request.request_id, task.task_type, task.source) for task in zero if isinstance(task, Task)} == {
        ("r0", "summarise", "keywords"), ("r2", "haiku", "client"),
    }  # fmt: skip
    assert isinstance(one[0], Task)
    assert one[0].task_type == "classify"
    assert one[1] == Cancel(request_id="r1", pool=1, deadline_ms=9)
    await world.until_committed()
    assert running.metric("requests_total", task_type="summarise", source="keywords") == 1
    assert running.metric("requests_total", task_type="other", source="client") == 1
    assert running.metric("cancels_total") == 1
    assert running.metric("delay_seconds_count") == 3
    await running.stop()


async def test_keys_and_headers_travel_along(world: World) -> None:
    running = await world.start()
    await world.send(request(0))
    (record,) = await world.read("tasks", 0, 1)
    assert record.key == b"r0"
    assert list(record.headers) == [("traceparent", b"00-ab")]
    await running.stop()


async def test_what_can_not_be_read_is_buried_and_its_client_told(world: World) -> None:
    running = await world.start()
    garbage = await world.send(b"\xc1")
    body = msgspec.msgpack.encode({"v": 1, "kind": "request", "request_id": "r9", "pool": 1, "prompt_ids": "?"})
    readable = await world.send(body, b"r9")
    await world.send(None, b"tombstone")
    (rejected,) = await world.tasks(1, 1)
    letters: list[DeadLetter] = [
        decode(record.value or b"", DeadLetter) for record in await world.read("dead-letters", 0, 3)
    ]
    by_key = {letter.key: letter for letter in letters}
    assert by_key[b"?"].payload == garbage.value
    assert (by_key[b"?"].partition, by_key[b"?"].offset) == (garbage.partition, garbage.offset)
    assert by_key[b"r9"].payload == body
    assert rejected == Rejected(request_id="r9", pool=1, reason=by_key[b"r9"].reason)
    assert "prompt_ids" in by_key[b"r9"].reason
    assert by_key[b"tombstone"].payload is None
    await world.until_committed()
    assert await world.committed() != dict.fromkeys(range(PARTITIONS), 0)
    assert readable.offset >= 0
    await world.until(lambda: running.metric("dead_letters_total") == 3)
    await running.stop()


async def test_a_thousand_malformed_payloads(world: World) -> None:
    running = await world.start()
    good = encode(request(0))
    for number in range(1000):
        cut = good[: number % len(good)] + bytes([number % 256]) * (number % 7 + 1)
        await world.send(cut, str(number).encode())
    await world.send(request(1))
    tasks = await world.tasks(1, 1)
    await world.until_committed()
    assert any(isinstance(task, Task) and task.request.request_id == "r1" for task in tasks)
    assert running.metric("dead_letters_total") >= 990
    assert running.service.unready is None
    await running.stop()


async def test_a_letter_that_is_too_large_goes_without_its_payload(world: World) -> None:
    running = await world.start()
    await world.send(b"\xc1" * 60_000)
    (record,) = await world.read("dead-letters", 0, 1)
    letter: DeadLetter = decode(record.value or b"", DeadLetter)
    assert letter.payload is None
    assert "60000 bytes" in letter.reason
    await world.until_committed()
    await running.stop()


async def test_a_request_that_tasks_never_takes_gets_an_outcome(world: World) -> None:
    running = await world.start()
    await world.send(request(1, prompt="x" * 120_000))
    (rejected,) = await world.tasks(1, 1)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "it could not be passed on", "which its client reads: no topic is named"
    (record,) = await world.read("dead-letters", 0, 1)
    letter: DeadLetter = decode(record.value or b"", DeadLetter)
    assert "too large: tasks takes" in letter.reason
    await world.until_committed()
    await running.stop()


async def test_a_request_that_is_not_sent_for_long_is_not_given_up(world: World) -> None:
    """A missing broker is not "too large". What was accepted waits, however often it is tried."""
    tries = 3 * CONFIG.append_tries
    log = TroubledLog(world.broker, in_turn("tasks", *["unsent"] * tries))
    running = await world.start(log=log)
    await world.send(request(1))
    (task,) = await world.tasks(1, 1)
    assert isinstance(task, Task)
    await world.until_committed()
    assert running.metric("dead_letters_total") == 0
    assert running.metric("append_retries_total") == tries
    await running.stop()


async def test_order_within_a_key_holds_whatever_acknowledgements_are_lost(world: World) -> None:
    """Requests and their cancels; every third append is not acknowledged, half of these landed all the same."""
    count = 0

    def trouble(topic: str, value: bytes | None) -> str | None:
        nonlocal count
        count += 1
        return {0: "lost", 3: "landed"}.get(count % 6)

    running = await world.start(log=TroubledLog(world.broker, trouble))
    for number in range(200):
        await world.send(request(number))
        await world.send(Cancel(request_id=f"r{number}", pool=number % POOLS, deadline_ms=9))
    await world.until_committed()
    kinds: dict[str, list[str]] = defaultdict(list)
    for pool in range(POOLS):
        end = await world.log.offset_at("tasks", pool, 2**60)
        for record in await world.tasks(pool, end):
            if isinstance(record, Task):
                kinds[record.request.request_id].append("task")
            elif isinstance(record, Cancel):
                kinds[record.request_id].append("cancel")
    assert len(kinds) == 200
    for order in kinds.values():
        assert order == ["task"] * order.count("task") + ["cancel"] * order.count("cancel")
        assert {"task", "cancel"} == set(order)
    assert running.metric("append_retries_total") > 50
    await running.stop()


async def test_nothing_is_committed_past_what_is_not_appended(world: World) -> None:
    stuck = {"r3"}

    def trouble(topic: str, value: bytes | None) -> str | None:
        if topic != "tasks" or value is None:
            return None
        task: Task = decode(value, Task)
        return "lost" if task.request.request_id in stuck else None

    log = TroubledLog(world.broker, trouble)
    running = await world.start(log=log)
    sent = [await world.send(request(number)) for number in range(30)]
    await world.until(lambda: running.metric("in_flight") == 1 and len(log.appends) > 60)
    held = next(record for record in sent if record.key == b"r3")
    committed = await world.committed()
    assert committed[held.partition] == held.offset
    others = {number: end for number, end in (await world.ends()).items() if number != held.partition}
    assert {number: committed[number] for number in others} == others
    stuck.clear()
    await world.until_committed()
    await running.stop()


async def test_what_is_in_flight_is_bounded(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "held")
    running = await world.start(log=log, config=_config(max_in_flight=4))
    for number in range(50):
        await world.send(request(number))
    await log.holding.wait()
    await world.until(lambda: running.metric("in_flight") == 4)
    assert len(log.appends) == 4
    log.release()
    await world.until_committed()
    await running.stop()


async def test_the_span_is_bounded_while_one_record_is_stuck(world: World) -> None:
    def trouble(topic: str, value: bytes | None) -> str | None:
        return "held" if topic == "tasks" and b"stuck" in (value or b"") else None

    log = TroubledLog(world.broker, trouble)
    running = await world.start(log=log, config=_config(max_in_flight=4, max_span=10))
    stuck = await world.send(request(0, prompt="stuck"))
    for number in range(1, 200):
        await world.send(request(number))
    await log.holding.wait()
    await world.until(lambda: running.metric("in_flight") == 1)
    passed_on = sum([await world.log.offset_at("tasks", pool, 2**60) for pool in range(POOLS)])
    assert passed_on < 199
    assert (await world.committed())[stuck.partition] == stuck.offset
    log.release()
    await world.until_committed()
    await running.stop()


async def test_a_crash_between_append_and_commit_appends_again(world: World) -> None:
    appended = 0
    log = TroubledLog(world.broker)

    def after_append() -> None:
        nonlocal appended
        appended += 1
        if appended == 20:
            log.dead = True
            raise _Killed

    first = await world.start(log=log, after_append=after_append)
    for number in range(40):
        await world.send(request(number))
    with pytest.raises(_Killed):
        await asyncio.wait_for(first.task, DEADLINE_S)
    assert sum((await world.committed()).values()) < 20
    before = sum([await world.log.offset_at("tasks", pool, 2**60) for pool in range(POOLS)])
    assert before >= 20
    second = await world.start()
    await world.until_committed()
    seen = set()
    for pool in range(POOLS):
        end = await world.log.offset_at("tasks", pool, 2**60)
        seen |= {task.request.request_id for task in await world.tasks(pool, end) if isinstance(task, Task)}
    assert seen == {f"r{number}" for number in range(40)}
    await second.stop()


async def test_kills_at_any_moment_lose_nothing(world: World) -> None:
    """Twenty instances, each killed after some appends; requests and cancels keep coming."""
    sent = 0
    for round_ in range(20):
        running = await world.start()
        for _ in range(10):
            await world.send(request(sent))
            await world.send(Cancel(request_id=f"r{sent}", pool=sent % POOLS, deadline_ms=9))
            sent += 1
        await world.until(lambda log=running.log, enough=round_ % 7: len(log.appends) > enough)  # type: ignore[misc]
        await running.kill()
    last = await world.start()
    await world.until_committed()
    first_task: dict[str, int] = {}
    last_cancel: dict[str, int] = {}
    for pool in range(POOLS):
        end = await world.log.offset_at("tasks", pool, 2**60)
        for offset, record in enumerate(await world.tasks(pool, end)):
            if isinstance(record, Task):
                first_task.setdefault(record.request.request_id, offset)
            elif isinstance(record, Cancel):
                last_cancel[record.request_id] = offset
    assert set(first_task) == set(last_cancel) == {f"r{number}" for number in range(sent)}
    assert all(first_task[one] < last_cancel[one] for one in first_task)
    await last.stop()


async def test_two_share_the_partitions_and_one_takes_all_when_the_other_goes(world: World) -> None:
    one, two = await world.start(), await world.start()
    for number in range(60):
        await world.send(request(number))
    await world.until_committed()
    carried = [_carried(running) for running in (one, two)]
    await one.stop()
    for number in range(60, 90):
        await world.send(request(number))
    await world.until_committed()
    assert _carried(two) - carried[1] == 30
    await two.stop()


async def test_stopping_finishes_and_commits_what_was_read(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "held")
    running = await world.start(log=log)
    await world.send(request(0))
    await log.holding.wait()
    running.service.end(1.0)
    assert running.service.unready == "it is stopping"
    log.release()
    await asyncio.wait_for(running.task, DEADLINE_S)
    await world.until_committed()
    assert len(await world.tasks(0, 1)) == 1


async def test_stopping_is_bounded_when_the_log_takes_nothing(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "lost")
    running = await world.start(log=log)
    await world.send(request(0))
    await world.until(lambda: running.metric("append_retries_total") > 0)
    running.service.end(0.05)
    await asyncio.wait_for(running.task, DEADLINE_S)
    assert (await world.committed()) == dict.fromkeys(range(PARTITIONS), 0)


async def test_it_lives_as_a_part_of_a_process(world: World) -> None:
    registry = CollectorRegistry()
    extractor = KeywordExtractor(load_profile())
    service = TaskTypeService(CONFIG, world.log, extractor, TaskTypeMetrics(registry, extractor.names, extractor.name))
    assert service.unready is not None
    await service.start()
    assert service.unready is None
    await world.send(request(0))
    assert len(await world.tasks(0, 1)) == 1
    await service.drain(1.0)
    assert service.unready == "it is stopping"
    await service.stop()
    assert (await world.committed()) == await world.ends()


async def test_it_does_not_start_without_its_topics() -> None:
    extractor = KeywordExtractor(load_profile())
    async with MemoryLog() as log:
        service = TaskTypeService(
            CONFIG, log, extractor, TaskTypeMetrics(CollectorRegistry(), extractor.names, extractor.name)
        )
        with pytest.raises(LogFailed):
            await service.start()


async def test_it_says_when_the_log_takes_nothing(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "lost")
    running = await world.start(log=log, config=_config(stuck_after_s=0.02))
    await world.until(lambda: running.service.unready is None)
    await world.send(request(0))
    await world.until(lambda: "has not taken an append" in (running.service.unready or ""))
    log.trouble = no_trouble
    await world.until(lambda: running.service.unready is None)
    await running.stop()


async def test_the_lag_is_told_for_what_is_held(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "held")
    running = await world.start(log=log, config=_config(max_in_flight=1))
    sent = [await world.send(request(number)) for number in range(20)]
    in_zero = sum(record.partition == 0 for record in sent)
    registry = running.registry
    await world.until(lambda: registry.get_sample_value("greenroom_tasktype_lag", {"partition": "0"}) == in_zero)
    log.release()
    await world.until(lambda: registry.get_sample_value("greenroom_tasktype_lag", {"partition": "0"}) == 0)
    await running.stop()


async def test_a_log_that_failed_ends_it(world: World) -> None:
    running = await world.start()
    await world.until(lambda: running.service.unready is None)
    for number in range(PARTITIONS):
        for _ in range(3):
            await world.log.append("requests", b"x", key=b"k", partition=number)
    await world.until_committed()
    await running.stop()
    for number in range(PARTITIONS):
        for _ in range(3):
            await world.log.append("requests", b"x", key=b"k", partition=number)
        world.broker.delete_records("requests", number, 5)
    failing = await world.start()
    with pytest.raises(LogFailed):
        await asyncio.wait_for(failing.task, DEADLINE_S)


async def test_pools_that_are_added_are_found(world: World) -> None:
    log = TroubledLog(world.broker)
    log.shown_partitions = 1
    running = await world.start(log=log)
    await world.until(lambda: running.service.unready is None)
    log.shown_partitions = POOLS
    await world.send(request(0, pool=1))
    assert isinstance((await world.tasks(1, 1))[0], Task)
    await running.stop()


async def test_the_bytes_in_flight_are_bounded(world: World) -> None:
    log = TroubledLog(world.broker, lambda topic, value: "held")
    running = await world.start(log=log, config=_config(max_in_flight_bytes=30_000))
    await world.until(lambda: running.service.unready is None)
    for number in range(200):
        await world.send(request(number, prompt="x" * 1000))
    await log.holding.wait()
    await world.until(lambda: running.metric("in_flight") >= 25)
    assert len(log.appends) < 30 + 64
    log.release()
    await world.until_committed()
    await running.stop()


@pytest.mark.parametrize("seed", range(4))
async def test_instances_that_come_go_and_die_lose_nothing(world: World, seed: int) -> None:
    """Up to three at once, at random moments started, stopped and killed, on a log that loses acknowledgements."""
    chance = random.Random(seed)

    def trouble(topic: str, value: bytes | None) -> str | None:
        return chance.choice([None, None, None, "lost", "landed"])

    alive: list[Running] = []
    for number in range(150):
        await world.send(request(number))
        if chance.random() < 0.5:
            await world.send(Cancel(request_id=f"r{number}", pool=number % POOLS, deadline_ms=9))
        match chance.randrange(12):
            case 0 if len(alive) < 3:
                alive.append(await world.start(log=TroubledLog(world.broker, trouble)))
            case 1 if alive:
                await alive.pop(chance.randrange(len(alive))).kill()
            case 2 if alive:
                await alive.pop(chance.randrange(len(alive))).stop()
            case _:
                await asyncio.sleep(0.001)  # the others' turn
    last = await world.start()
    await world.until_committed()
    for running in (*alive, last):
        await running.stop()
    tasks: dict[str, int] = {}
    cancels: dict[str, int] = {}
    for pool in range(POOLS):
        end = await world.log.offset_at("tasks", pool, 2**60)
        for offset, record in enumerate(await world.tasks(pool, end)):
            if isinstance(record, Task):
                tasks.setdefault(record.request.request_id, offset)
            elif isinstance(record, Cancel):
                cancels[record.request_id] = offset
    assert set(tasks) == {f"r{number}" for number in range(150)}
    assert all(tasks[name] < offset for name, offset in cancels.items())
    assert await world.log.offset_at("dead-letters", 0, 2**60) == 0


class _Killed(Exception):
    """Stands for a process that ends there."""


def _config(**fields: Any) -> TaskTypeConfig:
    return dataclasses.replace(CONFIG, **fields)


def _carried(running: Running) -> float:
    return running.metric("requests_total", task_type="summarise", source="keywords")
