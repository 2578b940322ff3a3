"""``--scheduling emoe`` in the whole pipeline: SLOs come from clients' headers, c and ΔE from the worker."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from greenroom.core.machine import machine_name
from greenroom.core.model_profile import ModelProfile
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway.service import GatewayService
from greenroom.text import TextProcessor
from greenroom.worker.generation_engine import EngineState
from tests.pipeline.embedded import complete, embedded
from tests.pipeline.worker.scripted import CARD, ScriptedEngine
from tests.unit.policies.model_profiles import model_profile, task_profile
from tests.waiting import until

SAYS = 20
PROFILE = model_profile({"code": task_profile([[1, 1, 1], [1, 1, 1]], writes=SAYS)}, load_ms={1: 1.0})
OF_ANOTHER = model_profile({"code": task_profile([[1, 1]], writes=SAYS)}, load_ms={1: 1.0})


class Costly(ScriptedEngine):
    """A token of it takes a second, it says."""

    def state(self) -> EngineState:
        return replace(super().state(), token_ms=1000.0)


def served(
    text: TextProcessor, engine: ScriptedEngine, profile: ModelProfile | None = None
) -> AbstractAsyncContextManager[tuple[GatewayService, CollectorRegistry]]:
    return embedded(EmbeddedConfig(scheduling="emoe"), engine, CARD, text, profile=profile)


async def ask(gateway: GatewayService, **slos: float) -> int:
    """The status; ``slos`` as headers."""
    body = {"model": CARD.name, "prompt": [5, 6], "max_tokens": SAYS, "task_type": "code"}
    headers = {f"X-SLO-{name}-Ms": str(value) for name, value in slos.items()}
    status, _ = await complete(gateway, body, headers)
    return status


def metrics(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("profile", [None, OF_ANOTHER], ids=["no profile", "another model's"])
async def test_a_request_that_would_spoil_anothers_slo_begins_when_that_one_has_ended(
    text: TextProcessor, profile: ModelProfile | None
) -> None:
    """The worker's own figures count, and a profile of a model with other experts does not."""
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


@pytest.mark.parametrize(("machine", "warned"), [("Another CPU, 3 cores", True), (machine_name(), False), ("", False)])
async def test_costs_that_were_measured_on_another_machine_than_a_workers_are_said_to_be_such(
    text: TextProcessor, caplog: pytest.LogCaptureFixture, machine: str, warned: bool
) -> None:
    code = task_profile([[1, 1, 1], [1, 1, 1]], writes=SAYS)
    profile = model_profile({"code": code}, load_ms={1: 1.0}, machine=machine)
    async with served(text, ScriptedEngine(), profile):
        pass
    said = [one.getMessage() for one in caplog.records if one.name == "greenroom.scheduler.pool_runner"]
    found = [one for one in said if "measured on Another CPU, 3 cores" in one]
    assert len(found) == warned, "once a machine"
    assert all(machine_name() in one for one in found)


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
