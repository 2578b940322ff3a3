"""No request gets a wrong token if a worker's model loses a mover or its device, or can not read its disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import ModelBroken
from greenroom.core.generation import SamplingParams
from greenroom.core.messages import Task
from greenroom.demo import bundled_model_path
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.batch.completions import complete
from greenroom.v1 import common_pb2
from greenroom.worker.faults import Fault, kill_mover
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.runs.results import request_of
from greenroom.worker.service import WorkerFailed
from tests.pipeline.worker.scripted import staged, task_of, until
from tests.waiting import DEADLINE_S

POLICIES = ("moe-infinity", "reuse")
LENGTH = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextmanager
def model_of(policy: str, folder: Path) -> Iterator[ModelRuntime]:
    """The bundled model with a quarter of its experts. moe-infinity has an EAMC, so it prefetches."""
    eamc = folder / "eamc.safetensors" if policy == "moe-infinity" else None
    if eamc is not None:
        random = np.random.default_rng(3)
        matrices = (random.integers(1, 9, (12, 96)) * (random.random((12, 96)) < 1 / 3)).astype(np.float32)
        EamcFile(model="understudy", experts_per_layer=(16,) * 6, sequences=12, matrices=matrices).write(eamc)
    config = WorkerConfig(
        str(bundled_model_path()), dtype="float32", expert_memory="25%", policy=policy, eamc=eamc, threads=1,
        cache_dir=folder, warm_start=False,
    )  # fmt: skip
    worker = ModelRuntime(config)
    try:
        yield worker
    finally:
        with suppress(ModelBroken):
            worker.close()


def asked(model: ModelRuntime, name: str) -> Task:
    task = task_of(name, prompt=model.text.tokenizer.encode("Once there was a fox who", add_special_tokens=True))
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    return msgspec.structs.replace(task, request=msgspec.structs.replace(task.request, sampling=sampling))


async def alone(model: ModelRuntime, task: Task) -> tuple[int, ...]:
    """What the model says with nothing else running."""
    (said,) = await asyncio.to_thread(complete, model.loop, [request_of(task)], timeout_s=60)
    assert len(said.token_ids) == LENGTH
    return said.token_ids


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_worker_that_loses_a_mover_ends_and_its_requests_go_to_others(policy: str, folder: Path) -> None:
    with model_of(policy, folder) as model:
        whole = await alone(model, asked(model, "whole"))
        async with staged(ModelEngine(model), card_of(model)) as stage:
            gateway = await stage.gateway()
            await stage.lease()
            gateway.expect("cut")
            call = stage.run(asked(model, "cut"))
            failing = asyncio.create_task(stage.service.failed())
            await until(lambda: len(gateway.got["cut"]) > 3)
            kill_mover(model.experts.movers[0])
            assert isinstance(await failing, WorkerFailed)
            assert stage.service.unready == "the model has failed"
            assert isinstance(model.loop.failure, ModelBroken)
            said = tuple(gateway.got["cut"])
            assert said == whole[: len(said)]
            assert not call.done(), "no answer is what makes it a loss"
            call.cancel()
    assert policy != "moe-infinity" or model.experts.counters.prefetches > 0
    with model_of(policy, folder) as other:
        async with staged(ModelEngine(other), card_of(other)) as stage:
            gateway = await stage.gateway()
            await stage.lease()
            gateway.expect("cut", *said)
            done = await stage.run(asked(other, "cut"), 1)
            assert tuple(done.result.token_ids) == whole


async def test_a_worker_that_loses_its_device_ends_and_fails_no_request(folder: Path) -> None:
    with model_of("reuse", folder) as model:
        whole = await alone(model, asked(model, "whole"))
        fault = Fault()
        async with staged(ModelEngine(model, fault=fault), card_of(model)) as stage:
            gateway = await stage.gateway()
            await stage.lease()
            failing = asyncio.create_task(stage.service.failed())
            for name in ("first", "second"):
                gateway.expect(name)
            calls = [stage.run(asked(model, name)) for name in ("first", "second")]
            await until(lambda: sum(map(len, gateway.got.values())) >= 4)
            fault.device = 1
            assert isinstance(await failing, WorkerFailed)
            assert stage.service.unready == "the model has failed"
            assert isinstance(model.loop.failure, ModelBroken)
            assert not any(call.done() for call in calls), "no answer is what makes it a loss"
            said = [tuple(gateway.got[name]) for name in ("first", "second")]
            assert all(ids == whole[: len(ids)] for ids in said)
            for call in calls:
                call.cancel()


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_disk_that_can_not_be_read_fails_a_request_clearly_and_the_worker_goes_on(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = False
    read_part = PackFile.read_part

    def troubled(pack: PackFile, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        if broken:
            raise OSError(5, "Input/output error")
        read_part(pack, layer, expert, start, buffer)

    monkeypatch.setattr(PackFile, "read_part", troubled)
    with model_of(policy, folder) as model:
        whole = await alone(model, asked(model, "whole"))
        async with staged(ModelEngine(model), card_of(model)) as stage:
            gateway = await stage.gateway()
            await stage.lease()
            gateway.expect("ill")
            call = stage.run(asked(model, "ill"))
            await until(lambda: len(gateway.got["ill"]) > 3)
            broken = True
            ended = (await call).result
            assert ended.reason == common_pb2.END_REASON_FAILED
            assert "could not be had: OSError: [Errno 5] Input/output error" in ended.message
            assert tuple(ended.token_ids) == whole[: len(ended.token_ids)]
            broken = False
            gateway.expect("well")
            done = await stage.run(asked(model, "well"))
            assert tuple(done.result.token_ids) == whole
            assert stage.service.unready is None
        assert model.loop.wait_idle(DEADLINE_S)
        assert model.loop.stats().audit_failures == 0
