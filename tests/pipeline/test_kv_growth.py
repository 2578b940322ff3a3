"""Many chats without max_tokens in little KV memory, in the whole pipeline: side by side, with the same texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from greenroom.demo import bundled_model_path, bundled_profile_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway.service import GatewayService
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.traces.routing import RoutingRecorder
from tests.pipeline.embedded import embedded
from tests.waiting import DEADLINE_S

PROMPTS = [one.prompt for task in TASKS for one in samples(task, 8, seed=17)]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ModelRuntime]:
    config = WorkerConfig(
        model=str(bundled_model_path()),
        served_model_name="understudy",
        dtype="float32",
        kv_memory="3MiB",
        max_running=64,
        profile=bundled_profile_path(),
        cache_dir=tmp_path,
        warm_start=False,
        threads=1,
        progress=False,
    )
    with ModelRuntime(config) as made:
        yield made
        assert made.loop.wait_idle(DEADLINE_S)
        assert made.loop.stats().audit_failures == 0


async def chat(gateway: GatewayService, prompt: str) -> tuple[str, int]:
    """What is said, in how many tokens."""
    body: dict[str, Any] = {
        "model": "understudy", "messages": [{"role": "user", "content": prompt}], "temperature": 0.0
    }  # fmt: skip
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http,
        http.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=body) as response,
    ):
        said = await response.json()
        assert response.status == 200, said
        return str(said["choices"][0]["message"]["content"]), int(said["usage"]["completion_tokens"])


@pytest.mark.parametrize("scheduling", [pytest.param("fcfs", marks=pytest.mark.full), "emoe"])
async def test_chats_without_a_limit_run_side_by_side_and_say_what_each_says_alone(
    worker: ModelRuntime, scheduling: str
) -> None:
    recorder = RoutingRecorder(worker.experts.catalogue, most_rows=256)
    engine = ModelEngine(worker, recorder)
    most = 0
    pause = worker.loop.between_steps
    assert pause is not None

    def between_steps() -> None:
        nonlocal most
        most = max(most, len(worker.loop.engine.running))
        pause()

    worker.loop.between_steps = between_steps
    config = EmbeddedConfig(scheduling=scheduling, max_running=64)
    async with embedded(config, engine, card_of(worker), worker.text, profile=worker.profile) as (gateway, _):
        alone = [await chat(gateway, prompt) for prompt in PROMPTS]
        assert most == 1
        together = await asyncio.gather(*(chat(gateway, prompt) for prompt in PROMPTS))
    assert most >= 12, f"{most} at once, where one would reserve all the memory"
    assert list(together) == alone
    stats = worker.loop.stats()
    assert stats.recomputed_rows <= 0.1 * (stats.rows - stats.recomputed_rows)
    assert recorder.held == 0
