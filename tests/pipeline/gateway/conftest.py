"""A real server on a real port, in front of a generator that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.requests.request_handler import RequestGenerator
from greenroom.text import TextProcessor
from tests.scripted_generator import DEADLINE_S, ScriptedGenerator
from tests.scripted_pool import pipeline_to
from tests.waiting import until


@dataclass
class Server:
    """``http`` is a raw client; ``url`` for others."""

    url: str
    port: int
    gateway: Gateway
    generator: ScriptedGenerator
    text: TextProcessor
    registry: CollectorRegistry
    http: aiohttp.ClientSession

    def metric(self, name: str, **labels: str) -> float:
        labels = labels or {"model_name": self.generator.model.name}
        value = self.registry.get_sample_value(f"greenroom_{name}", labels)
        assert value is not None, (name, labels)
        return value

    async def settled(self) -> None:
        """Waits until no sequence runs and every one is counted."""
        await self.generator.until_idle()
        if tasks := set(self.gateway._requests.tasks):
            _, running = await asyncio.wait(tasks, timeout=DEADLINE_S)
            assert not running

    async def over(self, path: str, status: int = 200) -> None:
        """Waits until a request to ``path`` was answered with ``status``, is counted and its span has ended. The reader
        of a stream may have all of it before that."""
        labels = {"path": path, "status": str(status)}
        await until(
            lambda: self.registry.get_sample_value("greenroom_http_requests_total", labels), f"{path} is answered"
        )

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, JSON and headers."""
        async with self.http.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json(), response.headers


@pytest.fixture
def config() -> dict[str, Any]:
    """What a test sets; parametrise it indirectly or override it."""
    return {}


@pytest.fixture
def through_log() -> bool:
    """Whether a pipeline is between the gateway and the generator: requests with an idempotency key need it."""
    return False


@pytest.fixture
async def server(config: dict[str, Any], text: TextProcessor, through_log: bool) -> AsyncIterator[Server]:
    """Stopped at the end. No sequence and no task may then be left, whatever the test did."""
    before = asyncio.all_tasks()
    registry = CollectorRegistry()
    generator = ScriptedGenerator(text.tokenizer)
    async with AsyncExitStack() as stack:
        behind: RequestGenerator = generator
        if through_log:
            behind = await stack.enter_async_context(pipeline_to(generator))
        gateway = Gateway(GatewayConfig(port=0, **{"drain_timeout_s": 0, **config}), behind, text, registry)
        port = await gateway.start()
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http:
            server = Server(url, port, gateway, generator, text, registry, http)
            yield server
        await gateway.stop()
    await generator.until_idle()
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0
    left = {task for task in asyncio.all_tasks() - before if "gateway" in str(task.get_coro()) or "pump" in str(task)}
    assert not left
