"""What expertflow foretells from tokens: from the routing of finished requests to the worker that uses it.

The bundled model with a third of its experts in memory, in fp32, as ``greenroom serve`` has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import samples
from greenroom.embedded import EmbeddedConfig
from greenroom.gateway.service import GatewayService
from greenroom.moe.batch.completions import complete as complete_all
from greenroom.policies.expertflow.token_tables import TokenTables
from greenroom.predictor import PredictorConfig
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.replay.traces.recorder import TraceRecorder
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.files_beside import files_beside
from greenroom.worker.model.metrics import WorkerCollector
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.traces.routing import RoutingRecorder
from tests.paths_files import empty_tables
from tests.pipeline.embedded import complete, embedded
from tests.waiting import until

LENGTH, PROMPTS, LIMIT_S = 40, 16, 240.0
MODEL, PATHS = "understudy", PathsFile.KIND


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    return WorkerConfig(
        str(bundled_model_path()),
        dtype="float32",
        expert_memory="33%",
        policy="expertflow",
        max_running=4,
        threads=1,
        cache_dir=tmp_path_factory.mktemp("cache"),
        served_model_name=MODEL,
        warm_start=False,
    )


@contextmanager
def working(config: WorkerConfig) -> Iterator[ModelRuntime]:
    with ModelRuntime(config) as made:
        yield made
        assert made.loop.wait_idle(LIMIT_S)
        stats = made.loop.stats()
        assert (stats.audit_failures, stats.path_failures) == (0, 0)


async def ask(gateway: GatewayService, seed: int) -> str:
    prompts = [one.prompt for one in samples("converse", PROMPTS, seed=seed)]
    body = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    answers = await asyncio.gather(*(complete(gateway, {**body, "prompt": prompt}) for prompt in prompts))
    assert {status for status, _ in answers} == {200}
    return "".join(said["choices"][0]["text"] for _, said in answers)


@pytest.mark.parametrize("tokens", [True, False])
async def test_tables_are_made_of_the_tokens_that_workers_tell_and_of_no_others(
    config: WorkerConfig, tokens: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are the same before and after."""
    building = BuildingConfig(kinds=(PATHS,), when_asked=False, reuse_after=PROMPTS, timeout_s=LIMIT_S)
    own = EmbeddedConfig(
        artifact_every_s=0.02,
        trace_tokens=tokens,
        predictor=PredictorConfig(building=building, publish_after_s=0.05),
    )
    with working(config) as worker:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(worker))
        # Which tokens are told is the configuration's to say, whatever is recorded.
        engine = ModelEngine(worker, RoutingRecorder(worker.experts.catalogue, most_rows=256, tokens=True))
        async with embedded(own, engine, card_of(worker), worker.text, registry=registry) as (gateway, _):

            def value(name: str, **labels: str) -> float:
                return registry.get_sample_value(f"greenroom_{name}", labels) or 0.0

            before = await ask(gateway, seed=3)
            if not tokens:
                await until(lambda: value("predictor_unbuildable_total") == PROMPTS, within_s=LIMIT_S)
                assert caplog.text.count("paths of 'understudy' is made of tokens, and some of its workers") == 1
                assert value("predictor_builds_total", kind=PATHS, result="published") == 0
                return
            await until(lambda: value("worker_artifacts_total") == 1, within_s=LIMIT_S)
            assert value("predictor_unbuildable_total") == 0
            assert await ask(gateway, seed=3) == before
            assert value("expert_artifact_version", kind=PATHS) == 1
            assert worker.loop.stats().paths_seconds > 0
            assert value("worker_artifacts_refused_total") == 0


def test_what_foretells_is_told_of_every_rows_picks(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recorder of the same run has them."""
    told: dict[tuple[int, int], list[list[int]]] = {}

    def picked(self: TokenTables, sequences: np.ndarray, positions: np.ndarray, picks: np.ndarray) -> None:
        for sequence, position, of_row in zip(sequences.tolist(), positions.tolist(), picks.tolist(), strict=True):
            assert (sequence, position) not in told
            told[sequence, position] = of_row

    monkeypatch.setattr(TokenTables, "picked", picked)
    with working(config) as worker:
        experts = tuple(worker.experts.catalogue.experts_per_layer.tolist())
        tables = empty_tables(experts, vocabulary=worker.served.vocab_size)
        worker.loop.engine.swap_paths(worker.prepare(tables).prepared)
        recorder = worker.experts.listener = TraceRecorder(worker.experts.catalogue)
        prompts = [
            worker.text.tokenizer.encode(one.prompt, add_special_tokens=True) for one in samples("converse", 3, seed=1)
        ]
        asked = [GenerationRequest(f"r{n}", tuple(ids), SamplingParams(max_tokens=5)) for n, ids in enumerate(prompts)]
        complete_all(worker.loop, asked)
        trace = recorder.trace()
        worker.experts.listener = None
    assert trace.tokens == len(told) > 3 * 5
    for sequence in range(trace.sequences):
        rows = trace.experts[trace.seq_starts[sequence] : trace.seq_starts[sequence + 1]]
        assert [told[sequence, place] for place in range(len(rows))] == rows.tolist()


async def test_a_file_gives_the_first_version_and_others_are_passed_over(
    config: WorkerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "paths.safetensors"
    with working(config) as worker:
        experts = tuple(worker.experts.catalogue.experts_per_layer.tolist())
        vocabulary = worker.served.vocab_size
        assert worker.artifacts[PATHS] is None
    empty_tables(experts, vocabulary=vocabulary, version=7).write(path)
    with working(replace(config, paths=path)) as worker:
        engine = ModelEngine(worker)
        used = engine.artifacts[PATHS]
        assert used is not None
        assert used.version == 7
        with pytest.raises(InvalidConfig, match="one of this model"):
            engine.swap(empty_tables((4, 4), version=8))
        with pytest.raises(InvalidConfig, match="a vocabulary of"):
            engine.swap(empty_tables(experts, vocabulary=vocabulary + 1, version=9))
        assert engine.artifacts[PATHS] == used
    for wrong in (empty_tables((4, 4)), empty_tables(experts, vocabulary=vocabulary + 1)):
        wrong.write(path)
        with pytest.raises(InvalidConfig, match="paths"):
            ModelRuntime(replace(config, paths=path))


def test_it_is_taken_up_from_the_model_s_folder_for_either_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def found(policy: str, batching: str) -> Path | None:
        return files_beside(tmp_path, policy, {}, (), batching=batching).get(PATHS)

    with caplog.at_level(logging.WARNING):
        assert found("expertflow", "fcfs") is None
    assert "`greenroom paths fit` makes one" in caplog.text
    empty_tables((4, 4)).write(tmp_path / "paths.safetensors")
    for policy, batching in (("expertflow", "fcfs"), ("reuse", "token-scheduler"), ("lru", "token-scheduler:seed=3")):
        assert found(policy, batching) == tmp_path / "paths.safetensors"
    assert found("reuse", "fcfs") is None


def test_a_batch_policy_that_reads_paths_takes_the_option() -> None:
    file = Path("paths.safetensors")
    for policy, batching in (("expertflow", "fcfs"), ("reuse", "token-scheduler")):
        assert WorkerConfig("m", policy=policy, batching=batching, paths=file).artifact_files == {PATHS: file}
    with pytest.raises(InvalidConfig, match="reuse takes no paths"):
        WorkerConfig("m", policy="reuse", paths=file)


async def test_any_expert_policy_runs_beside_a_batch_policy_that_is_told_paths(
    config: WorkerConfig, tmp_path: Path
) -> None:
    with working(config) as worker:
        experts, vocabulary = worker.experts.catalogue.experts_per_layer.tolist(), worker.served.vocab_size
    path = tmp_path / "paths.safetensors"
    empty_tables(tuple(experts), vocabulary=vocabulary).write(path)
    both = replace(config, policy="lru", batching="token-scheduler", paths=path)
    with working(both) as worker:
        engine = ModelEngine(worker)
        assert set(engine.artifacts) == {PATHS}
        artifact = worker.prepare(empty_tables(tuple(experts), vocabulary=vocabulary, version=2))
        assert np.isfinite(artifact.arrays["popularity"]).all()
