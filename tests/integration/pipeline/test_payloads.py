"""Topics written to by others than our services: garbage, version 1's payloads, requests by hand. And limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import grpc
import msgspec
import pytest

from greenroom.core.generation import FinishReason
from greenroom.core.messages import Cancel, DeadLetter
from greenroom.fabric.log import Position
from greenroom.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.cluster import Cluster, Process, running
from tests.integration.pipeline.malformed import Bad, malformed, samples
from tests.integration.pipeline.topics import Topics, request_by_hand, until
from tests.kafka.broker import Broker

MODEL = "greenroom-understudy"
ASK = {"model": MODEL, "prompt": "Say something.", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
TOPICS = ("requests", "tasks", "journal", "traces", "members")
UNREADABLE_MEMBERS = "greenroom_members_unreadable_total"


@pytest.fixture(scope="module")
def cluster(
    kafka_broker: Broker, cache: Path, tmp_path_factory: pytest.TempPathFactory, module_prefix: str
) -> Iterator[Cluster]:
    options = {"worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "4"]}
    folder = tmp_path_factory.mktemp("payloads")
    with running(Cluster(folder, kafka_broker.address, prefix=module_prefix, cache=cache, options=options)) as made:
        yield made
        made.check_logs()


@pytest.fixture(autouse=True)
def _all_stay(cluster: Cluster) -> Iterator[None]:
    """Nothing that a test wrote has ended a service, or made one unready."""
    here = [process for process in cluster.processes.values() if process.running]
    yield
    for process in here:
        assert process.running, f"{process.name} has ended:\n{process.log()[-4000:]}"
        process.wait_ready()


async def ask(cluster: Cluster, **fields: object) -> tuple[int, dict[str, str], dict[str, object]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.urls[0]}/v1/completions", json={**ASK, **fields}) as response,
    ):
        return response.status, dict(response.headers), await response.json()


async def text(cluster: Cluster) -> str:
    status, _, reply = await ask(cluster)
    assert status == 200, reply
    return str(reply["choices"][0]["text"])  # type: ignore[index]


# Garbage


async def flood(topics: Topics, topic: str, bad: list[Bad]) -> list[Position]:
    landed: list[Position] = []
    for start in range(0, len(bad), 100):
        appends = (topics.log.append(topic, one.value, key=one.key) for one in bad[start : start + 100])
        landed += await asyncio.gather(*appends)
    return landed


@pytest.mark.timeout(300)
async def test_a_thousand_malformed_records_in_each_topic(cluster: Cluster, topics: Topics) -> None:
    """Each is in the dead letters once, as it was. If its request can be told, that request has an outcome."""
    before = await text(cluster)
    garbage = {topic: malformed(topic, 1000) for topic in TOPICS}
    landed = {topic: await flood(topics, topic, bad) for topic, bad in garbage.items()}
    expected = {
        (topic, position.partition, position.offset): one.value
        for topic in TOPICS[:-1]
        for position, one in zip(landed[topic], garbage[topic], strict=True)
    }
    letters = await topics.dead_letters(lambda found: len(found) >= len(expected))
    found = {(letter.topic, letter.partition, letter.offset): letter.payload for letter in letters}
    assert found == expected
    assert len(letters) == len(expected), "once each"
    assert all(letter.reason and letter.service for letter in letters)

    owed = {one.request_id for topic in ("requests", "tasks") for one in garbage[topic] if one.request_id}
    assert len(owed) > 400
    for request_id in owed:
        outcome = await topics.journal.outcome(request_id)
        assert outcome.reason is FinishReason.FAILED
        assert outcome.message
    named = {letter.request_id for letter in letters if letter.topic in ("requests", "tasks") and letter.request_id}
    assert owed <= named

    for name in ("gateway0", "scheduler0", "worker0"):  # no letters of these: every process reads all of them
        await until(partial(_has_counted, cluster[name], 1000), f"{name} counts them")
    assert cluster["gateway0"].metric("greenroom_gateway_journal_unreadable_total") == 1000
    assert await text(cluster) == before


def _has_counted(process: Process, members: int) -> bool:
    return process.metric(UNREADABLE_MEMBERS) == members


async def test_the_dead_letters_themselves_may_be_anything(cluster: Cluster, topics: Topics) -> None:
    """No service reads them. A program for people does, and passes over what is no dead letter."""
    await topics.log.append("dead-letters", b"\xc1", key=b"x")
    [*_, last] = await topics.read("dead-letters")
    assert last.value == b"\xc1"
    assert await text(cluster)


async def test_a_letter_says_where_what_and_why(cluster: Cluster, topics: Topics) -> None:
    start = await topics.end("dead-letters")
    position = await topics.log.append("requests", b"not msgpack", key=b"some key")
    async with topics.log.reader("dead-letters", 0, start=start) as reader:
        [record] = await reader.poll(60.0, 1)
    letter = msgspec.msgpack.decode(record.value or b"", type=DeadLetter)
    assert (letter.topic, letter.partition, letter.offset) == ("requests", position.partition, position.offset)
    assert (letter.key, letter.payload, letter.service) == (b"some key", b"not msgpack", "tasktype")
    assert "not a record" in letter.reason


# The first version's payloads


async def test_the_first_versions_payloads_with_fields_of_the_future_are_taken(
    cluster: Cluster, topics: Topics
) -> None:
    """They are as they were committed, except for ids, addresses and deadlines, which are of their time."""
    start = await topics.end("dead-letters")
    unread = cluster["gateway0"].metric(UNREADABLE_MEMBERS)
    soon = int(time.time() * 1000) + 60_000
    asked = []
    for number, content in enumerate(samples("requests")):
        request_id = f"v1-{number}"
        content |= {"request_id": request_id, "pool": 0, "deadline_ms": soon}
        if content["kind"] == "request":
            content |= {"accepted_ms": soon - 60_000, "reply_to": None}
            content["sampling"] |= {"max_tokens": 4, "stop": []}
            asked.append(request_id)
        assert "from_the_future" in content
        await topics.log.append("requests", msgspec.msgpack.encode(content), key=request_id.encode())
    for number, content in enumerate(samples("tasks")):
        owner = content.get("request", content)
        owner |= {"request_id": f"v1-task-{number}", "pool": 0}
        await topics.log.append("tasks", msgspec.msgpack.encode(content), key=b"k", partition=0)
    for topic in ("journal", "traces", "members"):
        for number, content in enumerate(samples(topic)):
            content |= {"request_id": f"v1-{topic}-{number}", "pool": 0}
            if content["kind"] == "claim":
                content["read_to"] = 0  # before the claim that stands, else it would depose the scheduler
            if topic == "members":
                content |= {"instance": f"v1-{number}", "address": "127.0.0.1:1", "model": None, "pool": 7}
            await topics.log.append(topic, msgspec.msgpack.encode(content), key=content["request_id"].encode())
    for request_id in asked:
        outcome = await topics.journal.outcome(request_id)
        assert outcome.reason in (FinishReason.STOP, FinishReason.LENGTH), outcome
        assert outcome.token_ids
    for number in range(len(samples("tasks"))):
        outcome = await topics.journal.outcome(f"v1-task-{number}")
        assert outcome.reason in (FinishReason.EXPIRED, FinishReason.FAILED), "their deadlines are long over"
    assert await text(cluster)
    unfit = [
        record for record in await topics.read("dead-letters", start=start) if b"traces" not in (record.value or b"")
    ]  # the sample of a trace is of another model's shape, and may be refused for that
    assert not unfit
    assert cluster["gateway0"].metric(UNREADABLE_MEMBERS) == unread


# By hand


async def test_a_request_by_hand_without_a_client(topics: Topics) -> None:
    request = request_by_hand()
    await topics.send(request)
    outcome = await topics.journal.outcome(request.request_id)
    assert outcome.reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == 8
    assert outcome.prompt_tokens == len(request.prompt_ids)


async def test_a_cancel_that_arrives_before_its_request_is_honoured(cluster: Cluster, topics: Topics) -> None:
    request = request_by_hand()
    runs = cluster["worker0"].metric("greenroom_worker_runs_total")
    cancel = Cancel(request_id=request.request_id, pool=0, deadline_ms=request.deadline_ms, reason="no more")
    cancelled, asked = await topics.send(cancel), await topics.send(request)
    assert (cancelled.partition, cancelled.offset + 1) == (asked.partition, asked.offset)
    outcome = await topics.journal.outcome(request.request_id)
    assert (outcome.reason, outcome.message, outcome.token_ids) == (FinishReason.CANCELLED, "no more", ())
    others = [request_by_hand()]
    while (await topics.send(others[-1])).partition != asked.partition:  # the same way, so behind both
        others.append(request_by_hand())
    for other in others:
        assert (await topics.journal.outcome(other.request_id)).reason is FinishReason.LENGTH
    assert topics.journal.of(request.request_id) == [outcome]
    assert cluster["worker0"].metric("greenroom_worker_runs_total") == runs + len(others), "it never ran"


# Limits: from here on there is no worker


@pytest.fixture(scope="module")
def no_worker(cluster: Cluster) -> None:
    cluster["worker0"].kill()


@pytest.mark.usefixtures("no_worker")
async def test_what_is_not_done_in_time_expires(cluster: Cluster, topics: Topics) -> None:
    request = request_by_hand(timeout_s=1.0)
    await topics.send(request)
    status, _, reply = await ask(cluster, timeout=1.0)
    assert (status, reply["error"]["code"]) == (504, "expired")  # type: ignore[index]
    outcome = await topics.journal.outcome(request.request_id)
    assert outcome.reason is FinishReason.EXPIRED
    assert outcome.message


@pytest.fixture(scope="module")
def four_may_wait(cluster: Cluster) -> None:
    scheduler = cluster["scheduler0"]
    assert scheduler.terminate() == 0
    scheduler.start(GREENROOM_SCHEDULER_MAX_WAITING="4")
    scheduler.wait_ready()


@pytest.mark.usefixtures("no_worker", "four_may_wait")
async def test_more_than_may_wait_are_refused_before_they_are_accepted(cluster: Cluster, topics: Topics) -> None:
    scheduler = cluster["scheduler0"]
    await until(lambda: scheduler.metric("greenroom_scheduler_active") == 1, "it holds the pool")
    waiting = [request_by_hand() for _ in range(4)]
    for request in waiting:
        await topics.send(request)
    await until(lambda: scheduler.metric("greenroom_scheduler_waiting") == 4, "four wait")

    async def refused() -> tuple[int, dict[str, str], dict[str, object]]:
        """The depth takes a moment to reach the gateway. Until then requests are accepted, and shed."""
        async with asyncio.timeout(60):
            while True:
                status, headers, reply = await ask(cluster)
                error: dict[str, str] = reply["error"]  # type: ignore[assignment]
                assert (status, error["code"]) in [(429, "saturated"), (429, "shed")]
                assert int(headers["Retry-After"]) >= 1
                assert "wait" in error["message"]
                if error["code"] == "saturated":
                    return status, headers, reply

    await refused()
    ends = [await topics.end("requests", partition) for partition in range(8)]
    await refused()
    async with grpc.aio.insecure_channel(cluster.grpc_addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(error.value.trailing_metadata() or ())
    assert int(trailing["retry-after"]) >= 1
    assert trailing["greenroom-code"] == "saturated"
    assert [await topics.end("requests", partition) for partition in range(8)] == ends, "they were not accepted"
    for request in waiting:
        await topics.send(Cancel(request_id=request.request_id, pool=0, deadline_ms=request.deadline_ms))
        assert (await topics.journal.outcome(request.request_id)).reason is FinishReason.CANCELLED
