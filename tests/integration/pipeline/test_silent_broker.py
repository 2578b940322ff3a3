"""A broker is silent for most of a minute: what /health says, what clients get, and what is written twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from greenroom.core.messages import JournalRecord, Outcome, decode
from tests.integration.cluster import Cluster, Process, running
from tests.integration.pipeline.topics import Topics
from tests.kafka.broker import Broker

MODEL = "greenroom-understudy"
STREAMS = 6
SILENT_S = 15.0
QUIET_S = 30.0
MARGIN_S = 15.0


async def stream(session: aiohttp.ClientSession, url: str, number: int, begun: asyncio.Event) -> list[str]:
    """The data of its events, to its end."""
    body = {"model": MODEL, "prompt": f"Kira drinks {number}", "max_tokens": 900, "ignore_eos": True, "stream": True}
    data: list[str] = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                data.append(line[6:].decode().strip())
                begun.set()
    return data


async def until_unready(process: Process, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while await asyncio.to_thread(lambda: process.ready):
        assert time.monotonic() < deadline, f"{process.name} says that it is ready"
        await asyncio.sleep(0.5)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_silent_broker_is_told_and_hangs_no_client(
    mortal_broker: Broker, prefix: str, cache: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, mortal_broker.address, prefix=prefix, cache=cache)
    with running(cluster):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            streams = [
                asyncio.create_task(stream(session, cluster.urls[0], number, began))
                for number, began in enumerate(begun)
            ]
            await asyncio.gather(*(began.wait() for began in begun))
            await asyncio.to_thread(mortal_broker.pause)
            since = time.monotonic()
            try:
                await asyncio.gather(
                    *(until_unready(process, SILENT_S + MARGIN_S) for process in cluster.processes.values())
                )
                ended = await asyncio.gather(*streams)
                assert time.monotonic() - since < SILENT_S + QUIET_S + MARGIN_S
            finally:
                await asyncio.to_thread(mortal_broker.resume)
            for data in ended:
                if data[-1] != "[DONE]" or "error" in json.loads(data[-2]):
                    error = json.loads(next(one for one in reversed(data) if one != "[DONE]"))["error"]
                    assert error["code"] == "outcome_unknown"
            assert any("outcome_unknown" in one for data in ended for one in data), "some had come to no end"
            for process in cluster.processes.values():
                assert process.running
                await asyncio.to_thread(process.wait_ready)
        async with Topics.of(cluster) as topics, topics.log.reader("journal", 0) as reader:
            end, written = await reader.end(), Counter[str]()
            while reader.position < end:
                for record in await reader.poll(1.0):
                    content: JournalRecord = decode(record.value or b"", JournalRecord)
                    if isinstance(content, Outcome):
                        written[content.request_id] += 1
        assert len(written) == STREAMS
        assert set(written.values()) == {1}, f"outcomes by how often they were written: {written}"
