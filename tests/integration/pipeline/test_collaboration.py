"""A collaboration on Kafka, in processes: two workers with real experts, of which one is killed half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.coe.served_board import Board, make_board
from tests.integration.cluster import Cluster, running
from tests.kafka.broker import Broker
from tests.pipeline.inferences.conftest import body, outputs_of
from tests.waiting import DEADLINE_S

ROUNDS = 6


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return make_board(tmp_path_factory.mktemp("board"))


@pytest.fixture
def cluster(kafka_broker: Broker, prefix: str, board: Board, tmp_path: Path) -> Iterator[Cluster]:
    worker = ["--coe", str(board.file), "--expert-memory", "33%", "--executors", "1", "--max-batch", "4"]
    made = Cluster(
        tmp_path,
        kafka_broker.address,
        prefix=prefix,
        cache=board.cache,
        workers=2,
        predictors=0,
        options={"gateway": ["--coe"], "worker": worker},
    )
    with running(made):
        yield made


async def test_a_killed_worker_loses_nothing(cluster: Cluster, board: Board) -> None:
    """Every request has one answer with the path and the label of its sample, whoever computed it."""
    url = f"{cluster.urls[0]}/v2/models/board/infer"
    asked = [sample for _ in range(ROUNDS) for sample in board.samples]
    answered = asyncio.Semaphore(0)

    async def infer(http: aiohttp.ClientSession, image: bytes, component: str) -> tuple[int, Any]:
        async with http.post(url, json=body([image], component)) as response:
            reply = await response.json()
        answered.release()
        return response.status, reply

    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(infer(http, sample.image, sample.component)) for sample in asked]
            for _ in range(len(asked) // 8):
                await answered.acquire()
            cluster["worker0"].kill()
        for sample, call in zip(asked, calls, strict=True):
            status, reply = call.result()
            assert status == 200, reply
            outputs = outputs_of(reply)
            assert [one for one in outputs["path"]["data"] if one] == list(sample.experts)
            assert outputs["label"]["data"] == [sample.labels[-1]]
    assert cluster["worker1"].metric("greenroom_coe_requests_failed_total") == 0
    assert cluster["worker1"].terminate() == 0
    cluster.check_logs()
