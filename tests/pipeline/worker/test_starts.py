"""A model answers while its experts are still being loaded, and answers the same afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.errors import TransferFailed
from greenroom.core.generation import SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.experts.copying.mover import Job, Mover
from greenroom.experts.engine import ExpertEngine
from greenroom.llm import LLM
from greenroom.policies.base.expert_policy import ExpertPolicy, Target
from greenroom.policies.registry import create_policy
from greenroom.worker.model import model_runtime
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.metrics import WorkerCollector
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.model.warm_start import ResidentSetFile
from tests.waiting import DEADLINE_S


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Until it is set, links move nothing for the first fill."""
    gate = Event()
    chosen = Mover._first_waiting

    def first_waiting(self: Mover) -> Job | None:
        return chosen(self) if gate.is_set() or self._prefetches else None

    monkeypatch.setattr(Mover, "_first_waiting", first_waiting)
    yield gate
    gate.set()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(cache: Path, **settings: object) -> WorkerConfig:
    return WorkerConfig(
        str(bundled_model_path()), expert_memory="90%", threads=1, cache_dir=cache, **settings  # type: ignore[arg-type]
    )  # fmt: skip


def open_gate(gate: Event, worker: ModelRuntime) -> None:
    gate.set()
    for mover in worker.experts.movers:
        with mover._changed:
            mover._changed.notify_all()


def metric(worker: ModelRuntime, name: str) -> float:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker))
    value = registry.get_sample_value(f"greenroom_{name}")
    assert value is not None
    return value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_is_answered_while_the_fill_is_under_way(gate: Event, cache: Path, dtype: str) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=8)
    with LLM(config=config(cache, dtype=dtype, policy="lru", warm_start=False)) as llm:
        worker = llm.worker
        assert worker.loop.ready
        (early,) = llm.generate("copy: a b c ->", sampling)
        assert not worker.wait_filled(0.0)
        assert metric(worker, "expert_fill_left") > 0
        assert worker.experts.fill_progress.experts == 0
        open_gate(gate, worker)
        assert worker.wait_filled(DEADLINE_S)
        assert worker.loop.wait_idle(DEADLINE_S)
        assert len(worker.experts.resident_keys()) == worker.experts.device.slots
        assert metric(worker, "expert_fill_left") == 0
        assert metric(worker, "expert_fill_bytes") > 0
        (late,) = llm.generate("copy: a b c ->", sampling)
        assert early.token_ids == late.token_ids
        assert worker.loop.stats().audit_failures == 0


def test_a_model_that_is_closed_meanwhile_remembers_what_was_to_come(gate: Event, cache: Path) -> None:
    with ModelRuntime(config(cache, policy="lru")) as worker:
        slots, catalogue = worker.experts.device.slots, worker.experts.catalogue
        assert not worker.wait_filled(0.0)
    assert len(ResidentSetFile(worker.pack.path).load(catalogue)) == slots
    assert len(worker.experts.resident_keys()) == 0


def test_where_answers_depend_on_what_is_resident_the_start_waits(
    gate: Event, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runtime, "_STALLED_FILL_S", 0.05)
    with pytest.raises(TransferFailed, match=r"no expert was loaded within 0\.05 s"):
        ModelRuntime(config(cache, policy="lru", fidelity="paper"))
    gate.set()
    monkeypatch.setattr(model_runtime, "_STALLED_FILL_S", DEADLINE_S)
    with ModelRuntime(config(cache, policy="lru", fidelity="paper")) as worker:
        assert worker.wait_filled(0.0)
        assert len(worker.experts.resident_keys()) == worker.experts.device.slots


def test_where_answers_depend_on_what_is_resident_an_expert_that_can_not_be_read_ends_the_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others would answer in its place, and nobody would be told."""
    before = ExpertEngine.wait_filled

    def with_a_failure(self: ExpertEngine, *arguments: Any) -> bool:
        found = before(self, *arguments)
        self._first_fill.progress = self.fill_progress._replace(failed=1)
        return found

    monkeypatch.setattr(ExpertEngine, "wait_filled", with_a_failure)
    with pytest.raises(TransferFailed, match="1 experts could not be read"):
        ModelRuntime(config(cache, policy="lru", fidelity="paper"))


def test_where_all_experts_fit_a_policy_that_drops_what_it_does_not_want_is_asked_once_they_are_there(
    gate: Event, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first request would have it drop them, one that comes later would not."""
    monkeypatch.setattr(model_runtime, "_STALLED_FILL_S", 0.05)
    made = create_policy

    def dropping(*arguments: Any, **more: Any) -> ExpertPolicy:
        policy = made(*arguments, **more)
        policy.target = Target(0, np.zeros(policy.catalogue.size, dtype=np.bool_), drop_others=True)
        return policy

    monkeypatch.setattr(model_runtime, "create_policy", dropping)
    with pytest.raises(TransferFailed, match="no expert was loaded"):
        ModelRuntime(replace(config(cache, policy="lru"), expert_memory="100%"))
    with ModelRuntime(config(cache, policy="lru")) as worker:
        assert not worker.wait_filled(0.0), "where they do not all fit requests need not wait"
