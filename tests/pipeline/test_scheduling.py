"""``--scheduling emoe`` in the whole pipeline: SLOs come from clients' headers, c and ΔE from the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from greenroom.core.model_profile import ModelProfile
from greenroom.embedded import EmbeddedConfig, embedded_parts
from greenroom.gateway import GatewayConfig
from greenroom.gateway.service import GatewayService
from greenroom.text import TextProcessor
from greenroom.worker.generation_engine import EngineState
from tests import small_tokenizers
from tests.pipeline.worker.scripted import CARD, ScriptedEngine
from tests.unit.policies.model_profiles import model_profile, task_profile
from tests.waiting import until

LIMIT_S = 20.0
SAYS = 20
PROFILE = model_profile({"code": task_profile([[1, 1, 1], [1, 1, 1]], writes=SAYS)}, load_ms={1: 1.0})
OF_ANOTHER = model_profile({"code": task_profile([[1, 1]], writes=SAYS)}, load_ms={1: 1.0})


class Costly(ScriptedEngine):
    """A token of it takes a second, it says."""

    def state(self) -> EngineState:
        return replace(super().state(), token_ms=1000.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return TextProcessor.from_folder(small_tokenizers.write_chat(folder))


@asynccontextmanager
async def served(
    text: TextProcessor, engine: ScriptedEngine, profile: ModelProfile | None = None, **options: Any
) -> AsyncIterator[tuple[GatewayService, CollectorRegistry]]:
    registry = CollectorRegistry()
    gateway, parts = embedded_parts(
        EmbeddedConfig(scheduling="emoe", scheduling_options=options),
        GatewayConfig(port=0, drain_timeout_s=0),
        engine=engine,
        card=CARD,
        text=text,
        registry=registry,
        profile=profile,
    )
    async with AsyncExitStack() as stack:
        for part in parts:
            await part.start()
            stack.push_async_callback(part.stop)
        await until(lambda: gateway.unready is None)
        yield gateway, registry


async def ask(gateway: GatewayService, **slos: float) -> int:
    """The status; ``slos`` as headers."""
    body = {"model": CARD.name, "prompt": [5, 6], "max_tokens": SAYS, "task_type": "code"}
    headers = {f"X-SLO-{name}-Ms": str(value) for name, value in slos.items()}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http,
        http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body, headers=headers) as response,
    ):
        return response.status


def metrics(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("profile", [None, OF_ANOTHER], ids=["no profile", "another model's"])
async def test_one_that_would_spoil_anothers_slo_is_begun_when_that_has_ended(
    text: TextProcessor, profile: ModelProfile | None
) -> None:
    """By what the worker says: a profile of a model with other experts does not count."""
    engine = Costly()
    async with served(text, engine, profile) as (gateway, registry):
        first = asyncio.create_task(ask(gateway, E2E=30_000))  # 22 s alone, 44 beside the other
        await until(lambda: len(engine.begun) == 1)
        second = asyncio.create_task(ask(gateway))
        await until(lambda: metrics(registry)['greenroom_scheduler_waiting{pool="0"}'] == 1.0)
        assert len(engine.begun) == 1
        engine.step(SAYS)
        assert await first == 200
        await until(lambda: len(engine.begun) == 2)
        engine.step(SAYS)
        assert await second == 200
        found = metrics(registry)
        for estimator in ("eq3", "processor-sharing"):
            assert found[f'greenroom_scheduler_latency_ratio_count{{estimator="{estimator}",pool="0"}}'] == 2.0


async def test_the_workers_profile_is_the_schedulers_too(text: TextProcessor) -> None:
    """By it a token takes a millisecond, so the second does no harm."""
    engine = Costly()
    async with served(text, engine, PROFILE) as (gateway, _):
        asked = [asyncio.create_task(ask(gateway, E2E=30_000))]
        await until(lambda: len(engine.begun) == 1)
        asked.append(asyncio.create_task(ask(gateway)))
        await until(lambda: len(engine.begun) == 2)
        engine.step(SAYS)
        assert await asyncio.gather(*asked) == [200, 200]
