"""The engine of a worker's service: results on its event loop, once, and none that is not wanted any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from greenroom.coe.computing.expert_result import ExpertResult, Stage
from greenroom.coe.serving.outcomes import Outcome
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.core.collaboration import InputKind
from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import FinishReason
from greenroom.core.inference import InferenceInput, InferenceRequest
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.worker.collaboration.collaboration_engine import CollaborationEngine
from greenroom.worker.collaboration.outputs import outputs_of
from greenroom.worker.inference_engine import InferenceEngine, InferenceResult
from tests.unit.coe.serving.scripted_collaboration import BAD, DEADLY, SELECTIONS, Scripted, path_of
from tests.waiting import until


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted(SELECTIONS["pull"], executors=1, held=True) as made:
        made.store.open()
        yield made


def engine_of(scripted: Scripted) -> CollaborationEngine:
    experts = [SimpleNamespace(takes=InputKind.IMAGE)] * 6
    costs = SimpleNamespace(costs=SimpleNamespace(load_ms_by_expert={0: 3.0}))
    made = SimpleNamespace(
        engine=scripted.engine, collaboration=SimpleNamespace(experts=experts), costs=costs, sizes=(1,) * 6
    )
    return CollaborationEngine(cast(CollaborationRuntime, made))


def image(data: bytes) -> tuple[InferenceInput, ...]:
    return (InferenceInput(kind=InputKind.IMAGE, data=data),)


def submit(
    engine: CollaborationEngine, name: str, data: bytes, value: str, into: list[Any], left_s: float = 60
) -> None:
    deadline_ms = (time.time() + left_s) * 1000
    engine.submit(name, image(data), value, deadline_ms=deadline_ms, priority=0, on_result=into.append)


async def test_results_come_once_and_what_is_executed_is_told(scripted: Scripted) -> None:
    engine = engine_of(scripted)
    assert isinstance(engine, InferenceEngine)
    told: list[frozenset[str]] = []
    engine.listen(lambda: told.append(frozenset(engine.executing())))
    found: list[InferenceResult] = []
    submit(engine, "one", b"\0", "d", found)
    await until(lambda: frozenset({"one"}) in told, "it is told")
    assert not found
    scripted.computers[0].permits.release(100)
    await until(lambda: found, "it ends")
    submit(engine, "bad", BAD, "d", found)
    submit(engine, "two", b"\1", "a", found)
    await until(lambda: len(found) == 3, "all end")
    outputs, bad, two = found
    assert outputs.outputs is not None
    assert outputs.outputs.path == ("d",)
    assert bad.invalid
    assert bad.error == "bad"
    assert two.outputs is not None
    assert [two.outputs.path[-1], two.outputs.label] == list(path_of(b"\1", "a")[-1])
    await until(lambda: engine.state().running == 0, "what was told is no longer counted")
    state = engine.state()
    assert (state.running, state.waiting, state.experts) == (0, 0, 6)
    assert state.resident_experts > 0


async def test_a_cancelled_one_has_no_result_and_comes_again(scripted: Scripted) -> None:
    engine = engine_of(scripted)
    engine.listen(lambda: None)
    first: list[InferenceResult] = []
    second: list[InferenceResult] = []
    submit(engine, "one", b"\0", "a", first)
    await until(lambda: "one" in engine.executing(), "it runs")
    engine.cancel("one")
    engine.cancel("nobody")
    submit(engine, "one", b"\0", "d", second)
    scripted.computers[0].permits.release(100)
    await until(lambda: second, "it ends")
    await until(lambda: scripted.engine.counters.left == 2, "both are gone")
    assert not first
    assert len(second) == 1


async def test_an_id_that_is_here_is_refused_and_the_first_one_is_served(scripted: Scripted) -> None:
    engine = engine_of(scripted)
    engine.listen(lambda: None)
    first: list[InferenceResult] = []
    second: list[InferenceResult] = []
    submit(engine, "one", b"\0", "d", first)
    submit(engine, "one", b"\0", "d", second)
    await until(lambda: second, "it is refused")
    assert second[0].invalid
    assert not first
    scripted.computers[0].permits.release(100)
    await until(lambda: first, "it is served")
    assert first[0].outputs is not None
    assert len(second) == 1


async def test_those_that_find_no_room_wait_for_it() -> None:
    """One that was cancelled is still computed, and has the room that the worker has promised to another."""
    with Scripted(SELECTIONS["pull"], executors=1, held=True, most_requests=2) as scripted:
        scripted.store.open()
        engine = engine_of(scripted)
        engine.listen(lambda: None)
        found: dict[str, list[InferenceResult]] = {name: [] for name in ("gone", "one", "two", "three", "left")}
        submit(engine, "gone", b"\0", "d", found["gone"])
        await until(lambda: "gone" in engine.executing(), "it runs")
        engine.cancel("gone")
        for name in ("one", "two", "three", "left"):
            submit(engine, name, b"\0", "d", found[name])
        again: list[InferenceResult] = []
        submit(engine, "two", b"\0", "d", again)
        await until(lambda: again, "it is here already")
        assert again[0].invalid
        engine.cancel("left")
        await until(lambda: engine.state().waiting == 3, "all wait")
        scripted.computers[0].permits.release(100)
        await until(lambda: all(found[name] for name in ("one", "two", "three")), "they end")
        assert all(found[name][0].outputs is not None for name in ("one", "two", "three"))
        assert not found["gone"]
        assert not found["left"]
        assert engine.state().waiting == 0


async def test_what_can_never_be_served_is_refused(scripted: Scripted) -> None:
    engine = engine_of(scripted)
    engine.listen(lambda: None)
    engine.check(InferenceRequest("one", image(b""), "a"))
    with pytest.raises(InvalidRequest, match="no value of the router"):
        engine.check(InferenceRequest("one", image(b""), "nobody"))
    with pytest.raises(InvalidRequest, match="no image"):
        engine.check(InferenceRequest("one", (InferenceInput(kind=InputKind.TEXT, data=b""),), "a"))
    found: list[InferenceResult] = []
    submit(engine, "late", b"\0", "a", found, left_s=-1)
    submit(engine, "unknown", b"\0", "nobody", found)
    await until(lambda: len(found) == 2, "both end")
    assert all(one.outputs is None for one in found)


async def test_a_deadline_that_passes_is_no_failure(scripted: Scripted) -> None:
    engine = engine_of(scripted)
    engine.listen(lambda: None)
    late: list[InferenceResult] = []
    unknown: list[InferenceResult] = []
    submit(engine, "late", b"\0", "a", late, left_s=-1)
    submit(engine, "unknown", b"\0", "nobody", unknown)
    await until(lambda: late and unknown, "both end")
    assert (late[0].reason, late[0].expired, late[0].invalid) == (FinishReason.EXPIRED, True, False)
    assert (unknown[0].reason, unknown[0].expired, unknown[0].invalid) == (FinishReason.FAILED, False, True)


async def test_after_a_death_nothing_ends(scripted: Scripted) -> None:
    """The service learns of it, and the requests are another worker's."""
    engine = engine_of(scripted)
    changes: list[bool] = []
    engine.listen(lambda: changes.append(engine.alive))
    found: list[InferenceResult] = []
    submit(engine, "one", DEADLY, "a", found)
    scripted.computers[0].permits.release(100)
    await until(lambda: changes and not changes[-1], "it is told")
    submit(engine, "two", b"\0", "a", found)
    assert not engine.alive
    assert not found


def test_outputs() -> None:
    """Of the last expert, scores best first; of an embedding its bytes."""
    scores = {"worn": 0.25, "good": 0.75}
    stages = (Stage("a", ExpertResult("x", 1.0)), Stage("b", ExpertResult("good", 0.75, scores)))
    assert outputs_of(Outcome(stages)) == InferenceOutputs(
        path=("a", "b"), label="good", score=0.75, scores=(("good", 0.75), ("worn", 0.25))
    )
    embedded = ExpertResult(embedding=np.array([1.0, 2.0], dtype=np.float32))
    assert outputs_of(Outcome((Stage("e", embedded),))).embedding == np.array([1, 2], "<f4").tobytes()
