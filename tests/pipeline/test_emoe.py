"""eMoE in the whole pipeline in one process: the bundled model with a third of its experts in memory, in fp32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.core.model_profile import dump_model_profile
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway.service import GatewayService
from greenroom.moe.batch import completions
from greenroom.policies.emoe.policy import Emoe
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.traces.routing import RoutingRecorder
from tests.pipeline.embedded import complete, embedded
from tests.unit.policies.model_profiles import model_profile, task_profile
from tests.waiting import DEADLINE_S, until

LENGTH = 16
EVERY = 3


def config(
    cache: Path, *, expert_memory: str, policy: str, fidelity: str = "exact", profile: Path | None = None
) -> WorkerConfig:
    return WorkerConfig(
        str(bundled_model_path()),
        dtype="float32",
        expert_memory=expert_memory,
        policy=policy,
        fidelity=fidelity,
        profile=profile,
        max_running=8,
        threads=1,
        cache_dir=cache,
        served_model_name="understudy",
        warm_start=False,
    )


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[str]]:
    return {task: [sample.prompt for sample in samples(task, 3, seed=11)] for task in TASKS}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def answers(cache: Path, prompts: dict[str, list[str]]) -> dict[str, str]:
    """What the model says with all its experts in memory."""
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with ModelRuntime(config(cache, expert_memory="100%", policy="lru")) as worker:
        tokenizer = worker.text.tokenizer
        flat = [prompt for own in prompts.values() for prompt in own]
        requests = [
            GenerationRequest(f"r{number}", tuple(tokenizer.encode(prompt, add_special_tokens=True)), sampling)
            for number, prompt in enumerate(flat)
        ]
        said = completions.complete(worker.loop, requests, timeout_s=DEADLINE_S)
        return {prompt: tokenizer.decode(one.token_ids) for prompt, one in zip(flat, said, strict=True)}


@pytest.fixture(scope="module")
def worker(cache: Path) -> Iterator[ModelRuntime]:
    with ModelRuntime(config(cache, expert_memory="33%", policy="emoe")) as made:
        yield made
        assert made.loop.wait_idle(DEADLINE_S)
        assert made.loop.stats().audit_failures == 0


@asynccontextmanager
async def served(worker: ModelRuntime) -> AsyncIterator[tuple[GatewayService, ModelEngine, CollectorRegistry]]:
    """As ``greenroom serve --policy emoe`` has it."""
    engine = ModelEngine(worker, RoutingRecorder(worker.experts.catalogue, most_rows=256))
    config = EmbeddedConfig(forecast_every=EVERY, forecast_predictor="emoe-a")
    async with embedded(config, engine, card_of(worker), worker.text, profile=worker.profile) as (gateway, registry):
        yield gateway, engine, registry


async def ask(gateway: GatewayService, prompt: str) -> str:
    body = {"model": "understudy", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    status, said = await complete(gateway, body)
    assert status == 200, said
    return str(said["choices"][0]["text"])


def wanted(worker: ModelRuntime) -> set[int]:
    target = worker.experts.policy.target
    return set() if target is None else set(np.flatnonzero(target.wanted).tolist())


async def test_experts_follow_the_task_mix_and_answers_are_the_models_own(
    worker: ModelRuntime, prompts: dict[str, list[str]], answers: dict[str, str]
) -> None:
    assert isinstance(worker.experts.policy, Emoe)
    first, second = "classify", "converse"
    targets: dict[str, set[int]] = {}
    async with served(worker) as (gateway, engine, registry):

        def count(name: str, **labels: str) -> float:
            return registry.get_sample_value(f"greenroom_worker_{name}_total", labels) or 0.0

        for task in (first, second):
            said = await asyncio.gather(*(ask(gateway, prompt) for prompt in prompts[task]))
            assert [text.strip() for text in said] == [answers[prompt].strip() for prompt in prompts[task]]
            await until(lambda: count("forecasts") + count("forecasts_failed") > 0, "a forecast was asked for")
            said = [await ask(gateway, prompt) for prompt in prompts[task]]  # by what is known of the task by now
            assert [text.strip() for text in said] == [answers[prompt].strip() for prompt in prompts[task]]
            targets[task] = wanted(worker)
        loads = engine.state().load_ms_by_task
        assert {first, second} <= set(loads)
        assert all(value >= 0 for value in loads.values())
        assert loads[first] > 0, "its experts had to go"
    assert targets[first] != targets[second]
    assert len(targets[first]) <= worker.experts.device.slots
    worker.experts.listener = None


def test_with_a_profile_and_the_papers_fidelity_nothing_is_fetched_on_demand(
    cache: Path, prompts: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(5)
    profile = model_profile(
        {task: task_profile(random.dirichlet(np.full(16, 0.2), 6).tolist()) for task in TASKS},
        top_k=2,
        load_ms={1: 5.0, 50: 100.0},
        machine="Another CPU, 3 cores",
        expert_format="mxfp4",
    )
    (cache / "profile.json").write_bytes(dump_model_profile(profile))
    chosen = config(cache, expert_memory="50%", policy="emoe", fidelity="paper", profile=cache / "profile.json")
    with ModelRuntime(chosen) as worker:
        experts, policy = worker.experts, worker.experts.policy
        assert "the costs in the profile were measured on Another CPU, 3 cores" in caplog.text
        assert "were measured with experts as mxfp4, and here they are kept as plain" in caplog.text
        assert "on_layer_routed" not in policy.hooks
        assert wanted(worker) == set(experts.resident_keys().tolist()), (
            "what is popular over all tasks is there already"
        )
        state = ModelEngine(worker).state()
        assert profile.costs is not None
        loads = policy.loads_by_task()
        assert state.load_ms_by_task == {task: profile.costs.load_ms(loads[task]) for task in TASKS}
        assert all(loads[task] > 0 for task in TASKS)
        targets = []
        for task, own in prompts.items():
            tokenizer = worker.text.tokenizer
            sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
            completions.complete(
                worker.loop,
                [
                    GenerationRequest(
                        prompt, tuple(tokenizer.encode(prompt, add_special_tokens=True)), sampling, task_type=task
                    )
                    for prompt in own
                ],
                timeout_s=DEADLINE_S,
            )
            targets.append(frozenset(wanted(worker)))
        assert len(set(targets)) == len(TASKS)
        assert experts.counters.on_demand_fetches == 0
        assert experts.counters.prefetches > 20
