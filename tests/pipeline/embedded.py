"""All services in this process, as ``greenroom serve`` has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from greenroom.core.messages import ModelCard
from greenroom.core.model_profile import ModelProfile
from greenroom.embedded import EmbeddedConfig, embedded_parts
from greenroom.gateway import GatewayConfig
from greenroom.gateway.service import GatewayService
from greenroom.text import TextProcessor
from greenroom.worker.generation_engine import GenerationEngine
from greenroom.worker.inference_engine import InferenceEngine
from tests.waiting import DEADLINE_S, until


@asynccontextmanager
async def embedded(
    config: EmbeddedConfig,
    engine: GenerationEngine | InferenceEngine,
    card: ModelCard,
    text: TextProcessor | None,
    *,
    profile: ModelProfile | None = None,
    registry: CollectorRegistry | None = None,
    front: GatewayConfig | None = None,
) -> AsyncIterator[tuple[GatewayService, CollectorRegistry]]:
    """They are ready, with both APIs on free ports unless ``front`` says otherwise. The registry has all metrics."""
    registry = registry or CollectorRegistry()
    gateway, parts = embedded_parts(
        config,
        front or GatewayConfig(port=0, grpc_port=0, drain_timeout_s=0),
        engine=engine,
        card=card,
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


async def complete(
    gateway: GatewayService, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Status and content of the answer to a text completion."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http,
        http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()
