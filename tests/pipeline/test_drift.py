"""The EAMC of moe-infinity follows what is served, in the whole pipeline in one process (MoE-Infinity, §4.3, §8.5).

The bundled model with a third of its experts in memory, in fp32, as ``greenroom serve`` has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway.service import GatewayService
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.policy import RECALL, MoeInfinity
from greenroom.predictor import PredictorConfig
from greenroom.predictor.kinds.config import BuildingConfig, DriftConfig
from greenroom.worker.generation_engine import ArtifactVersion
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.metrics import WorkerCollector
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.traces.routing import RoutingRecorder
from tests.paths_files import empty_tables
from tests.pipeline.embedded import complete, embedded
from tests.pipeline.worker.test_model import Told
from tests.waiting import until

LENGTH, LIMIT_S = 8, 240.0
MODEL = "understudy"
DRIFT = DriftConfig(after=10, again=1000, settle=6)


class Hearing(RoutingRecorder):
    """Keeps the recall of each sequence."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue, most_rows=256)
        self.recalls: list[float] = []

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        super().sequence_reported(sequence, report)
        self.recalls.append(report[RECALL])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@contextmanager
def working(cache: Path, policy: str = "moe-infinity") -> Iterator[ModelRuntime]:
    config = WorkerConfig(
        str(bundled_model_path()),
        dtype="float32",
        expert_memory="33%",
        policy=policy,
        max_running=4,
        threads=1,
        cache_dir=cache,
        served_model_name=MODEL,
        warm_start=False,
    )
    with ModelRuntime(config) as made:
        yield made
        assert made.loop.wait_idle(LIMIT_S)
        assert made.loop.stats().audit_failures == 0


def served(
    worker: ModelRuntime, recorder: RoutingRecorder
) -> AbstractAsyncContextManager[tuple[GatewayService, CollectorRegistry]]:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker))
    building = BuildingConfig(drift=DRIFT, capacity=40)
    config = EmbeddedConfig(artifact_every_s=0.02, predictor=PredictorConfig(building=building, publish_after_s=0.05))
    return embedded(config, ModelEngine(worker, recorder), card_of(worker), worker.text, registry=registry)


def prompts(task: str, count: int, seed: int) -> list[str]:
    return [one.prompt for one in samples(task, count, seed=seed)]


async def ask(gateway: GatewayService, prompt: str) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    status, said = await complete(gateway, body)
    assert status == 200, said


async def test_a_shift_of_tasks_is_followed_while_serving(cache: Path) -> None:
    """The first collection is made of the first sequences. It does not foresee those of another task, so it is rebuilt
    of them. Then they are foreseen better."""
    with working(cache) as worker:
        recorder = Hearing(worker.experts.catalogue)
        policy = worker.experts.policy
        assert isinstance(policy, MoeInfinity)
        first = iter(prompts("converse", 20, seed=3))
        second, fresh = iter(prompts("summarise", 12, seed=3)), iter(prompts("summarise", 12, seed=4))
        async with served(worker, recorder) as (gateway, registry):

            def version() -> float | None:
                return registry.get_sample_value("greenroom_expert_artifact_version", {"kind": "eamc"})

            async def sent(prompts: Iterator[str], count: int) -> list[float]:
                """The recalls of so many sequences, four at a time."""
                begun = len(recorder.recalls)
                for _ in range(count // 4):
                    await asyncio.gather(*(ask(gateway, next(prompts)) for _ in range(4)))
                return recorder.recalls[begun:]

            async def taken(number: int) -> None:
                """So many versions; each is used from the next step on."""
                await until(
                    lambda: registry.get_sample_value("greenroom_worker_artifacts_total") == number, within_s=LIMIT_S
                )

            assert version() == 0
            assert await sent(first, 12) == [], "there is nothing to foresee by"
            await taken(1)
            before = await sent(first, 8)
            assert version() == 1
            shifted = await sent(second, 12)
            await taken(2)
            after = await sent(fresh, 12)
            assert version() == 2
            assert fmean(before) > 1.5 * fmean(shifted), (before, shifted)
            assert fmean(after) > 1.5 * fmean(shifted), (shifted, after)
            assert registry.get_sample_value("greenroom_worker_artifacts_refused_total") == 0


def collection(version: int, experts: tuple[int, ...]) -> EamcFile:
    matrices = np.random.default_rng(version).random((5, sum(experts))).astype(np.float32)
    return EamcFile(
        model=MODEL, experts_per_layer=experts, sequences=5, matrices=matrices, version=version, created_ms=version
    )  # fmt: skip


def coefficients(version: int, experts: tuple[int, ...]) -> ReuseFile:
    random = np.random.default_rng(version)
    return ReuseFile(
        model=MODEL,
        experts_per_layer=experts,
        sequences=5,
        version=version,
        created_ms=version,
        keep=np.array([0.5, 0.9], np.float32),
        weights=random.normal(size=(len(experts), 3)).astype(np.float32),
        bias=random.normal(size=sum(experts)).astype(np.float32),
        followers=np.zeros(0, np.float32),
    )


def tables(version: int, experts: tuple[int, ...]) -> PathsFile:
    return empty_tables(experts, version=version, model=MODEL, seed=version)


@pytest.mark.parametrize(
    ("policy", "kind", "made"),
    [("moe-infinity", "eamc", collection), ("reuse", "reuse", coefficients), ("expertflow", "paths", tables)],
)
async def test_swaps_while_requests_run_change_no_answer(
    cache: Path, policy: str, kind: str, made: Callable[[int, tuple[int, ...]], ArtifactFile]
) -> None:
    """Swaps come at any step. A file of another model is refused. The version in use is known."""
    told = Told()
    with working(cache, policy) as worker:
        engine = ModelEngine(worker)
        experts = tuple(worker.experts.catalogue.experts_per_layer.tolist())
        tokenizer = worker.text.tokenizer
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        requests = [
            GenerationRequest(
                task, tuple(tokenizer.encode(prompts(task, 1, seed=5)[0], add_special_tokens=True)), sampling
            )
            for task in TASKS[:4]
        ]
        engine.listen(told.take)

        async def said(first: int) -> list[list[int]]:
            for number, request in enumerate(requests, first):
                engine.begin(number, replace(request, request_id=f"{number}"))
            await until(lambda: all(told.ended(number) for number in range(first, first + 4)))
            return [told.ids(number) for number in range(first, first + 4)]

        async def swap_always() -> None:
            for version in itertools.count(1):
                engine.swap(made(version, experts))
                await until(lambda version=version: engine.artifacts[kind] == ArtifactVersion(version, version))  # type: ignore[misc]

        expected = await said(0)
        assert engine.artifacts == dict.fromkeys(worker.experts.policy.artifacts)
        swapping = asyncio.create_task(swap_always())
        assert await said(10) == expected
        swapping.cancel()
        await asyncio.wait([swapping])
        used = engine.artifacts[kind]
        assert used is not None
        assert used.version > 3, "several came between the steps"
        with pytest.raises(InvalidConfig, match="one of this model"):
            engine.swap(made(99, (4, 4)))
