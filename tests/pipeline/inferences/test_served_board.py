"""The bundled board behind the front door: all services in this process, and real experts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway import GatewayConfig
from greenroom.worker.collaboration.card import card_of
from greenroom.worker.collaboration.collaboration_engine import CollaborationEngine
from greenroom.worker.collaboration.metrics import CollaborationCollector
from tests.contract.coe.served_board import Board, make_board
from tests.pipeline.embedded import embedded
from tests.pipeline.inferences.conftest import body, outputs_of
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.unit.coe.serving.scripted_collaboration import SELECTIONS
from tests.waiting import DEADLINE_S, until


@dataclass
class Served:
    url: str
    http: aiohttp.ClientSession
    board: Board
    runtime: CollaborationRuntime
    registry: CollectorRegistry

    def metric(self, name: str) -> float:
        selection = self.runtime.config.selection
        labels = {"scheduling": selection.scheduling, "policy": selection.policy}
        return self.registry.get_sample_value(f"greenroom_coe_{name}", labels) or 0.0


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return make_board(tmp_path_factory.getbasetemp() / "board")


@pytest.fixture(params=["pull", "coserve"])
async def served(request: pytest.FixtureRequest, board: Board) -> AsyncIterator[Served]:
    config = ServingConfig(
        file=board.file, cache_dir=board.cache, selection=SELECTIONS[request.param], expert_memory="33%", executors=2
    )
    registry = CollectorRegistry()
    with CollaborationRuntime(config) as runtime:
        registry.register(CollaborationCollector(runtime))
        front = GatewayConfig(port=0, grpc_port=0, drain_timeout_s=0)
        around = embedded(
            EmbeddedConfig(), CollaborationEngine(runtime), card_of(runtime), None, registry=registry, front=front
        )
        timeout = aiohttp.ClientTimeout(DEADLINE_S)
        async with around as (gateway, _), aiohttp.ClientSession(timeout=timeout) as http:
            yield Served(f"http://127.0.0.1:{gateway.port}", http, board, runtime, registry)


async def infer(served: Served, images: list[bytes], component: str) -> tuple[int, dict[str, object]]:
    url = f"{served.url}/v2/models/board/infer"
    async with served.http.post(url, json=body(images, component)) as response:
        return response.status, await response.json()


async def test_the_samples_have_their_labels(served: Served) -> None:
    samples = served.board.samples
    replies = await asyncio.gather(*(infer(served, [sample.image], sample.component) for sample in samples))
    for sample, (status, reply) in zip(samples, replies, strict=True):
        assert status == 200, reply
        outputs = outputs_of(reply)
        assert [one for one in outputs["path"]["data"] if one] == list(sample.experts)
        assert outputs["label"]["data"] == [sample.labels[-1]]
    assert served.metric("requests_total") == served.metric("requests_ended_total") == len(samples)
    assert served.metric("stages_total") == sum(len(sample.experts) for sample in samples)
    assert served.metric("loads_total") > 0
    assert served.metric("batch_requests_sum") == served.metric("stages_total")
    await until(lambda: served.runtime.engine.waiting == 0)


async def test_bad_inputs_are_told_apart(served: Served) -> None:
    good = served.board.samples[0]
    (status, reply), (other, _) = await asyncio.gather(
        infer(served, [b"\x89PNG\r\n\x1a\n no picture"], good.component), infer(served, [good.image], good.component)
    )
    assert (status, other) == (400, 200), reply
    status, reply = await infer(served, [good.image], "NOBODY")
    assert status == 400
    assert "R0402" in str(reply) or "known" in str(reply)


async def test_it_is_listed(served: Served) -> None:
    async with served.http.get(f"{served.url}/v2/models/board") as response:
        told = await response.json()
    assert {one["name"] for one in told["inputs"]} == {"image", "component"}
    async with served.http.get(f"{served.url}/v1/models") as response:
        assert [one["id"] for one in (await response.json())["data"]] == ["board"]


async def test_a_dead_executor_ends_the_engine(served: Served) -> None:
    for executor in served.runtime.engine._executors.values():
        executor.stop()
    await until(lambda: not served.runtime.engine.alive)
