"""Real engines that are killed over a long queue: the bundled board, with all services in this process."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from greenroom.coe.computing.expert_computer import Computed
from greenroom.coe.computing.inputs import Input
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.executor import Computer
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.worker.collaboration.card import card_of
from greenroom.worker.collaboration.collaboration_engine import CollaborationEngine
from tests.contract.coe.served_board import Board, Sample, make_board
from tests.pipeline.inferences.conftest import body, outputs_of
from tests.pipeline.inferences.test_lost_workers import CALLS, KILLS, Cluster, batches_of, check_losses, killed, queued
from tests.pipeline.inferences.test_lost_workers import cluster as cluster
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.unit.coe.serving.scripted_collaboration import SELECTIONS
from tests.waiting import DEADLINE_S, until

EXECUTORS, MOST = 2, 8


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return make_board(tmp_path_factory.getbasetemp() / "board")


@dataclass
class Held:
    """A computer that begins a batch and goes on when it is let."""

    inner: Computer
    let: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)

    def compute(self, expert: int, inputs: Sequence[Input], weights: ExpertWeights) -> list[Computed]:
        self.begun.set()
        assert self.let.wait(DEADLINE_S)
        return self.inner.compute(expert, inputs, weights)


@contextmanager
def held_engine(board: Board, name: str) -> Iterator[tuple[CollaborationRuntime, CollaborationEngine, list[Held]]]:
    """A real engine whose computers compute nothing before they are let."""
    config = ServingConfig(
        file=board.file,
        cache_dir=board.cache,
        selection=SELECTIONS[name],
        expert_memory="33%",
        executors=EXECUTORS,
        most_batch=MOST,
    )
    let = threading.Event()
    with CollaborationRuntime(config) as runtime:
        computers = []
        for executor in runtime.engine._executors.values():
            computers.append(Held(executor._computer, let))
            executor._computer = computers[-1]
        try:
            yield runtime, CollaborationEngine(runtime), computers
        finally:
            let.set()


def asked(samples: Sequence[Sample]) -> dict[str, Any]:
    made = body([sample.image for sample in samples], None)
    values = [sample.component for sample in samples]
    made["inputs"].append({"name": "component", "shape": [len(values)], "datatype": "BYTES", "data": values})
    return made


async def in_a_batch(engine: CollaborationEngine, computers: Sequence[Held]) -> frozenset[str]:
    """What it executes, once each of its executors has begun."""
    await until(lambda: all(one.begun.is_set() for one in computers), "every executor is in a batch")
    return frozenset(engine.executing())


@pytest.mark.parametrize("name", ["pull", pytest.param("coserve", marks=pytest.mark.full)])
@batches_of
@pytest.mark.timeout(240)
async def test_three_kills_of_a_real_engine_over_a_long_queue(
    cluster: Cluster, board: Board, name: str, batch: int
) -> None:
    """A kill finds every executor in a batch, and the rest queued. All are served, with their samples' labels."""
    samples = [board.samples[at % len(board.samples)] for at in range(CALLS * batch)]
    batches = [samples[at : at + batch] for at in range(0, len(samples), batch)]
    url = f"http://127.0.0.1:{cluster.gateway.port}/v2/models/board/infer"

    async def ask(http: aiohttp.ClientSession, some: Sequence[Sample]) -> Any:
        raw = io.BytesIO(json.dumps(asked(some)).encode())  # aiohttp warns of large bodies as bytes
        async with http.post(url, data=raw, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    executed: list[frozenset[str]] = []
    with ExitStack() as engines:

        async def begin(number: int) -> Any:
            runtime, engine, computers = await asyncio.to_thread(engines.enter_context, held_engine(board, name))
            return engine, computers, await cluster.worker(f"w{number}", engine, card_of(runtime))

        engine, computers, worker = await begin(0)
        await until(lambda: cluster.gateway.unready is None)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http:
            calls = [asyncio.create_task(ask(http, some)) for some in batches]
            for kill in range(KILLS):
                await queued(engine, len(samples), 2 * EXECUTORS * MOST)
                executed.append(await in_a_batch(engine, computers))
                await killed(cluster, worker, executed[-1])
                engine, computers, worker = await begin(kill + 1)
            await queued(engine, len(samples), 2 * EXECUTORS * MOST)
            for one in computers:
                one.let.set()
            replies = await asyncio.gather(*calls)
        for some, reply in zip(batches, replies, strict=True):
            outputs = outputs_of(reply)
            most = outputs["path"]["shape"][1]
            paths = [outputs["path"]["data"][row * most : (row + 1) * most] for row in range(len(some))]
            assert [tuple(one for one in path if one) for path in paths] == [sample.experts for sample in some]
            assert outputs["label"]["data"] == [sample.labels[-1] for sample in some]
        assert all(2 <= len(one) <= EXECUTORS * MOST for one in executed)
        await check_losses(cluster, len(samples), executed)
        await worker.kill()
