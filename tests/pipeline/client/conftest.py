"""Gateways with the gRPC API, in front of generators that the test controls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from prometheus_client import CollectorRegistry

from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.requests.request_handler import RequestGenerator
from greenroom.text import TextProcessor
from tests.scripted_generator import ScriptedGenerator
from tests.scripted_pool import pipeline_to


@dataclass
class Place:
    """One gateway. ``address``: of its RPCs."""

    gateway: Gateway
    generator: ScriptedGenerator
    address: str


class Start(Protocol):
    async def __call__(self, *, through_log: bool = False, **config: Any) -> Place: ...


@pytest.fixture
async def start(text: TextProcessor) -> AsyncIterator[Start]:
    """Starts gateways; all are stopped at the end, and nothing may be left running in them. ``through_log``: a
    pipeline is between the gateway and its generator."""
    places: list[Place] = []
    stack = AsyncExitStack()

    async def start(*, through_log: bool = False, **config: Any) -> Place:
        generator = ScriptedGenerator(text.tokenizer)
        behind: RequestGenerator = generator
        if through_log:
            behind = await stack.enter_async_context(pipeline_to(generator))
        settings = GatewayConfig(port=0, **{"grpc_port": 0, "drain_timeout_s": 0, **config})
        gateway = Gateway(settings, behind, text, CollectorRegistry())
        await gateway.start()
        places.append(Place(gateway, generator, f"localhost:{gateway.grpc_port}"))
        return places[-1]

    async with stack:
        yield start
        for place in places:
            await place.gateway.stop()
    for place in places:
        await place.generator.until_idle()
