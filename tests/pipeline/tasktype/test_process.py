"""``greenroom tasktype`` as a process on a real broker, killed between an append and its commit."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from pathlib import Path

import pytest

from greenroom.core.messages import Cancel, DeadLetter, Rejected, Task, TaskRecord, decode, encode
from greenroom.fabric.log import Log
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from greenroom.fabric.topics import Topics, all_topics
from tests.kafka.broker import Broker
from tests.kafka.fixtures import kafka_broker  # noqa: F401
from tests.pipeline.commands import complaint_of, result_of
from tests.pipeline.service_process import DEADLINE_S, service_process
from tests.pipeline.tasktype.conftest import request


async def read(log: Log, topic: str, partition: int, until: int) -> list[bytes]:
    found: list[bytes] = []
    async with log.reader(topic, partition) as reader, asyncio.timeout(DEADLINE_S):
        while len(found) < until:
            found += [record.value or b"" for record in await reader.poll(0.5)]
    return found


async def test_killed_and_started_again(kafka_broker: Broker, tmp_path: Path) -> None:  # noqa: F811
    prefix = f"t{uuid.uuid4().hex[:8]}."
    arguments = ["tasktype", "--brokers", kafka_broker.address, "--topic-prefix", prefix, "--pools", "2"]
    fault = {"GREENROOM_FAULT": "tasktype:after-append:25"}
    async with KafkaLog(LogConfig(brokers=(kafka_broker.address,), prefix=prefix)) as log:
        await log.ensure(all_topics(Topics(pools=2)))
        partitions = await log.partitions("requests")
        broken = b"\x84\xa1v\x01\xa4kind\xa7request\xaarequest_id\xa3bad\xa4pool\x01"
        async with service_process(arguments, tmp_path / "first.log", fault) as first:
            for number in range(40):
                await log.append("requests", encode(request(number)), key=f"r{number}".encode())
            cancel = encode(Cancel(request_id="r0", pool=0, deadline_ms=9))
            await log.append("requests", cancel, key=b"r0")
            await log.append("requests", broken, key=b"bad")
            assert await first.ended() == -signal.SIGKILL
        async with service_process(arguments, tmp_path / "second.log") as second:
            ends = {number: await log.offset_at("requests", number, 2**60) for number in range(partitions)}
            async with asyncio.timeout(DEADLINE_S):
                while {number: await log.committed("requests", "tasktype", number) or 0 for number in ends} != ends:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await second.metric("greenroom_tasktype_dead_letters_total") == 1
            assert await second.signal(signal.SIGTERM) == 0, second.log
        found: list[TaskRecord] = []
        for pool in range(2):
            end = await log.offset_at("tasks", pool, 2**60)
            found += [decode(value, TaskRecord) for value in await read(log, "tasks", pool, end)]
        tasks = [task.request.request_id for task in found if isinstance(task, Task)]
        assert set(tasks) == {f"r{number}" for number in range(40)}
        assert [one.request_id for one in found if isinstance(one, Rejected)] == ["bad"]
        cancels = [number for number, one in enumerate(found) if isinstance(one, Cancel)]
        first_run = next(
            number for number, one in enumerate(found) if isinstance(one, Task) and one.request.request_id == "r0"
        )
        assert cancels
        assert first_run < cancels[-1]
        letters: list[DeadLetter] = [decode(value, DeadLetter) for value in await read(log, "dead-letters", 0, 1)]
        assert {letter.payload for letter in letters} == {broken}


@pytest.mark.parametrize("extractor", ["linear", "keywords"])
def test_an_extractor_can_be_tried_on_labelled_prompts(tmp_path: Path, extractor: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        ("summarise", "Summarise this"),
        ("compare", "zzz"),
        ("compare", "What is the difference between a and b?"),
    ]
    prompts.write_text("\n".join(json.dumps({"task_type": label, "prompt": text, "x": 1}) for label, text in lines))
    report = json.loads(result_of("tasktype", "--extractor", extractor, "--evaluate", str(prompts)).stdout)
    assert (report["prompts"], report["accuracy"], report["unknown"]) == (3, 0.6667, 0.3333)
    assert report["confusion"]["compare"] == {"compare": 1, "unknown": 1}


@pytest.mark.parametrize("text", ["{", '{"prompt": "x"}', '{"prompt": 3, "task_type": "a"}'])
def test_a_bad_line_is_named(tmp_path: Path, text: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x", "task_type": "a"}\n\n' + text)
    assert "line 3" in complaint_of("tasktype", "--evaluate", str(prompts))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--extractor", "linear", "--keywords"), "--extractor keywords"),
        (("--extractor", "keywords", "--weights"), "--extractor linear"),
        (("--weights",), "file of weights"),
        (("--keywords",), "file of keywords"),
    ],
)
def test_a_file_that_is_not_the_extractors_is_named(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")
    complaint = complaint_of("tasktype", *arguments, str(file))
    assert said in complaint
    assert "mine.json" in complaint
