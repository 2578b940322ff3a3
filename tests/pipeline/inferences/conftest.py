"""All services in this process, with a collaboration of experts that has no models: the twin."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from greenroom.embedded import EmbeddedConfig
from greenroom.gateway import GatewayConfig
from greenroom.gateway.service import GatewayService
from greenroom.worker.inference_twin import InferenceTwin, twin_card
from tests.pipeline.embedded import embedded
from tests.waiting import DEADLINE_S

MODEL = "board"


@dataclass
class Served:
    """``http`` is a raw client; ``url`` for others."""

    url: str
    gateway: GatewayService
    twin: InferenceTwin
    registry: CollectorRegistry
    http: aiohttp.ClientSession

    @property
    def infer_url(self) -> str:
        return f"{self.url}/v2/models/{MODEL}/infer"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.gateway._gateway.grpc_port}"

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"greenroom_{name}", labels) or 0.0

    async def post(self, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, JSON and headers of an infer call."""
        async with self.http.post(self.infer_url, json=body, **kwargs) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()


def body(images: Sequence[bytes], component: str | None = "U7", **more: Any) -> dict[str, Any]:
    """An infer call in JSON, images as base64."""
    image = {
        "name": "image",
        "shape": [len(images)],
        "datatype": "BYTES",
        "parameters": {"content_type": "base64"},
        "data": [base64.b64encode(one).decode() for one in images],
    }
    parameters = {"component": component} if component is not None else {}
    return {"inputs": [image], "parameters": {**parameters, **more.pop("parameters", {})}, **more}


def outputs_of(reply: Any) -> dict[str, Any]:
    """By name."""
    return {output["name"]: output for output in reply["outputs"]}


@pytest.fixture
def front() -> dict[str, Any]:
    """Fields of GatewayConfig that a test sets."""
    return {}


@pytest.fixture
def pool() -> dict[str, Any]:
    """Fields of EmbeddedConfig that a test sets."""
    return {}


@pytest.fixture
def twin() -> InferenceTwin:
    return InferenceTwin(twin_card(MODEL, max_pixels=1_000_000))


@pytest.fixture
async def served(twin: InferenceTwin, front: dict[str, Any], pool: dict[str, Any]) -> AsyncIterator[Served]:
    registry = CollectorRegistry()
    config = GatewayConfig(**{"port": 0, "grpc_port": 0, "drain_timeout_s": 0, **front})
    around = embedded(EmbeddedConfig(**pool), twin, twin.card, None, registry=registry, front=config)
    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    async with around as (gateway, _), aiohttp.ClientSession(timeout=timeout) as http:
        yield Served(f"http://127.0.0.1:{gateway.port}", gateway, twin, registry, http)
