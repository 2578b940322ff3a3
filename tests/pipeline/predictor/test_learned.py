"""Predictors that are learnt beside the statistics: trained, swapped in, kept, rolled back; and what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.messages import Trace
from greenroom.predictor.kinds.config import LearningConfig
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact, codec_of, dump_learned, load_learned
from greenroom.predictor.kinds.emoe.config import TrainingConfig
from greenroom.predictor.kinds.emoe.kind import EmoeKind
from greenroom.predictor.kinds.registry import learning_of
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.maker import make_in_subprocess
from greenroom.predictor.making.subprocess_job import JobFailed
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.samples import Sample
from greenroom.predictor.versions.store import FileStore
from greenroom.v1 import predictor_pb2
from tests.pipeline.predictor.conftest import DEADLINE_S, REAL, Running, World
from tests.pipeline.predictor.test_predictor import one
from tests.unit.predictor.kinds.emoe.untrained import EXPERTS, LAYERS, SLOTS, untrained
from tests.unit.predictor.kinds.emoe.worlds import topics
from tests.unit.predictor.worlds import trace
from tests.waiting import until

LEARNING = LearningConfig(after=10, again=30, timeout_s=DEADLINE_S, forecast_s=DEADLINE_S, tolerance=0.5)
"""The tolerance is wide, since so little data teaches little."""
GOOD = {"overlap": 0.7, "popularity_overlap": 0.7}
SH = ("/bin/sh", "-c")


def leaves(path: Path, artifact: LearnedArtifact, report: Mapping[str, float] = GOOD) -> Sequence[str]:
    """A trainer that leaves ``artifact`` with this report, whatever it is given."""
    path.write_bytes(dump_learned(dataclasses.replace(artifact, report=report)))
    return (*SH, 'cp "$0" "$2"', str(path))


def sequence(number: int, task_type: str = "a", model: str = "m") -> Trace:
    random = np.random.default_rng(number)
    picks = np.stack([[random.permutation(EXPERTS)[:SLOTS] for _ in range(LAYERS)] for _ in range(3)])
    return trace(picks, EXPERTS, request_id=f"r{number}", task_type=task_type, model=model)


async def ask(running: Running, predictor: str = EMOE_A, **fields: Any) -> predictor_pb2.ForecastResponse:
    request = predictor_pb2.ForecastRequest(**{"model": "m", "task_type": "a", "predictor": predictor, **fields})
    return await running.stub.Forecast(request, timeout=DEADLINE_S)


async def until_learned(running: Running, version: int = 1, predictor: str = EMOE_A) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await ask(running, predictor)).version != version or "learned" not in answer.source:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def artifacts(running: Running, kind: str = EMOE_A) -> predictor_pb2.ListArtifactsResponse:
    return await running.stub.ListArtifacts(
        predictor_pb2.ListArtifactsRequest(model="m", kind=kind), timeout=DEADLINE_S
    )  # fmt: skip


async def roll_back(running: Running, version: int, kind: str = EMOE_A) -> predictor_pb2.RollBackResponse:
    request = predictor_pb2.RollBackRequest(model="m", version=version, kind=kind)
    return await running.stub.RollBack(request, timeout=DEADLINE_S)


# -- served ------------------------------------------------------------------------------------------------------------


async def test_what_is_asked_for_is_learnt_by_a_real_trainer(world: World) -> None:
    """Forecasts come from statistics until the network is there. Then they are those of the artifact's own network."""
    from greenroom.predictor.kinds.emoe.networks import LearnedPredictor

    running = await world.start(learning=LEARNING, make=REAL)
    await world.send(*(sequence(number, "ab"[number % 2]) for number in range(12)))
    await world.until_committed()
    assert (await ask(running)).source == "task type"
    await until_learned(running)
    assert running.metric("trainings_total", kind=EMOE_A, result="published") == 1
    assert running.metric("trainings_total", kind=EMOE_L, result="published") == 0
    assert running.metric("serving_learned_version", model_name="m", kind=EMOE_A) == 1
    (kept,) = (await artifacts(running)).artifacts
    assert (kept.version, kept.kind, kept.sequences) == (1, EMOE_A, 10)
    get = predictor_pb2.GetArtifactRequest(model="m", kind=EMOE_A)
    data = b"".join([part.data async for part in running.stub.GetArtifact(get, timeout=DEADLINE_S)])
    assert len(data) == kept.bytes
    predictor = LearnedPredictor(load_learned(data))
    previous = np.random.default_rng(5).dirichlet(np.ones(EXPERTS), LAYERS).astype("<f4")
    for given in (None, previous):
        answer = await ask(running, previous=b"" if given is None else given.tobytes())
        assert (answer.source, answer.version, answer.sequences) == ("learned emoe-a", 1, 10)
        assert (answer.layers, answer.experts) == (LAYERS, EXPERTS)
        found = np.frombuffer(answer.distribution, "<f4").reshape(LAYERS, EXPERTS)
        np.testing.assert_allclose(found, predictor.forecast("a", given), rtol=1e-5)
    assert (await ask(running, "")).source == (await ask(running, "statistics")).source == "task type"
    await running.stop()


async def test_versions_restarts_and_rolling_back(world: World, tmp_path: Path) -> None:
    make = leaves(tmp_path / "artifact", untrained(EMOE_A))
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,))
    running = await world.start(learning=learning, make=make)
    await world.send(*(sequence(number) for number in range(10)))
    await until_learned(running, 1)
    await world.send(*(sequence(number) for number in range(10, 40)))
    await until_learned(running, 2)
    assert (await roll_back(running, 1)).serving.version == 1
    await world.send(*(sequence(number) for number in range(40, 70)))
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="published") == 3)
    assert (await ask(running)).version == 1
    await world.until_committed()  # by a version that has everything: stopping makes no further one
    statistics = (await ask(running, "")).version
    assert len((await artifacts(running, "")).artifacts) == len((await artifacts(running, "statistics")).artifacts) > 0
    await running.stop()

    running = await world.start(learning=learning, make=(*SH, "exit 1"))
    await until_learned(running, 1)
    listed = await artifacts(running)
    assert ([one.version for one in listed.artifacts], listed.serving) == ([1, 2, 3], 1)
    assert (await ask(running, "")).version == statistics
    assert (await roll_back(running, 0)).serving.version == 3
    await until_learned(running, 3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await roll_back(running, 9)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert running.metric("trainings_total", kind=EMOE_A, result="failed") == 0  # what was kept is not learnt anew yet
    await running.stop()


async def test_a_damaged_one_is_passed_over(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = leaves(tmp_path / "artifact", untrained(EMOE_A))
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,))
    running = await world.start(learning=learning, make=make)
    await world.send(*(sequence(number) for number in range(10)))
    await until_learned(running)
    await running.stop()
    (path,) = world.folder.glob(f"*/{EMOE_A}/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    running = await world.start(learning=learning, make=make)
    assert path.name in caplog.text
    assert (await ask(running)).source == "task type"
    await world.send(*(sequence(number) for number in range(10, 20)))
    await until_learned(running)
    await running.stop()


async def test_of_another_shape_than_the_statistics_it_is_not_used(world: World, tmp_path: Path) -> None:
    running = await world.start(
        learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,)), make=leaves(tmp_path / "a", untrained(EMOE_A))
    )
    await world.send(*(one(number, task_type="a") for number in range(10)))
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="published") == 1)
    await world.until_committed()
    assert (await ask(running)).source == "task type"
    await running.stop()


async def test_unknown_names_are_refused_with_the_known_ones(world: World) -> None:
    running = await world.start(learning=LEARNING)
    for call in (ask(running, "emoe-x"), artifacts(running, "emoe-x"), roll_back(running, 0, "emoe-x")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "statistics, emoe-a, emoe-l" in (caught.value.details() or "")
    assert list((await artifacts(running)).artifacts) == []
    assert (await ask(running)).source == "uniform"
    await running.stop()


async def test_a_previous_prompt_of_another_shape_is_refused(world: World, tmp_path: Path) -> None:
    running = await world.start(
        learning=dataclasses.replace(LEARNING, kinds=(EMOE_L,)), make=leaves(tmp_path / "a", untrained(EMOE_L))
    )
    await world.send(*(sequence(number) for number in range(10)))
    await until_learned(running, predictor=EMOE_L)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(running, EMOE_L, previous=b"1234")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await running.stop()


async def test_a_predictor_that_is_not_asked_for_is_not_learnt(world: World) -> None:
    running = await world.start(learning=LEARNING, make=(*SH, "exit 1"))
    await world.send(*(sequence(number) for number in range(30)))
    await world.until_committed()
    await ask(running, "")
    assert running.metric("trainings_total", kind=EMOE_A, result="failed") == 0
    assert running.metric("learning_sequences") == 30
    await ask(running)
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="failed") == 1)
    assert running.metric("trainings_total", kind=EMOE_L, result="failed") == 0
    await running.stop()


async def test_none_learns_nothing_and_keeps_nothing_for_it(world: World) -> None:
    running = await world.start(learning=learning_of("none"), make=(*SH, "exit 1"))
    await world.send(*(sequence(number) for number in range(12)))
    await world.until_committed()
    assert (await ask(running)).source == "task type"
    assert running.metric("learning_sequences") == 0
    await running.stop()


async def forget_m(world: World, running: Running) -> None:
    """By sequences of another model, for which there is no room beside it."""
    await world.send(*(sequence(number, f"t{number}", "other") for number in range(50, 60)))
    await world.until(lambda: running.metric("evicted_total", what="model") == 1)
    await world.until_committed()


ROOM = 8 * (2048 + 4 * (LAYERS + (LAYERS - 1) * EXPERTS) * EXPERTS)


async def test_what_is_forgotten_takes_what_was_learnt_with_it(world: World, tmp_path: Path) -> None:
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,), again=1000)
    running = await world.start(
        learning=learning, make=leaves(tmp_path / "a", untrained(EMOE_A)), max_bytes=ROOM
    )  # fmt: skip
    await world.send(*(sequence(number) for number in range(10)))
    await until_learned(running)
    await world.until_committed()
    await forget_m(world, running)
    assert (await ask(running)).source == "uniform"
    assert list((await artifacts(running)).artifacts) == []
    assert list(world.folder.glob(f"m-*/{EMOE_A}/*.safetensors")) == []
    running.service.learned.recent.audit()
    await running.stop()


@pytest.mark.parametrize("then", ['cp "$0" "$2"', "exit 1"])
async def test_what_is_forgotten_while_it_is_learnt_does_not_come_back(world: World, tmp_path: Path, then: str) -> None:
    flag = tmp_path / "go on"
    _, _, _, file = (*leaves(tmp_path / "a", untrained(EMOE_A)),)
    make = (*SH, f"while ! test -e '{flag}'; do sleep 0.02; done; {then}", file)
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,))
    running = await world.start(learning=learning, make=make, max_bytes=ROOM)
    await world.send(*(sequence(number) for number in range(10)))
    await world.until_committed()
    await forget_m(world, running)
    flag.touch()
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="failed") >= 1)  # other's
    assert list((await artifacts(running)).artifacts) == []
    assert not running.task.done()
    await running.stop()


async def test_what_is_worse_is_kept_and_not_served(world: World, tmp_path: Path) -> None:
    """It is not served after a restart either, unless it is asked for by its number."""
    good = leaves(tmp_path / "good", untrained(EMOE_A))[-1]
    worse = leaves(tmp_path / "worse", untrained(EMOE_A), {"overlap": 0.68, "popularity_overlap": 0.7})[-1]
    flag = tmp_path / "flag"
    make = (*SH, f'if test -e {flag}; then cp "{worse}" "$1"; else cp "{good}" "$1"; fi')
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,), again=10, tolerance=0.01)
    running = await world.start(learning=learning, make=make, keep=2)
    await world.send(*(sequence(number) for number in range(10)))
    await until_learned(running)
    flag.touch()
    for count in (1, 2, 3):
        await world.send(*(sequence(number) for number in range(10 * count, 10 * count + 10)))
        await world.until(lambda count=count: metric(running, "withheld") == count)  # type: ignore[misc]
    assert (await ask(running)).version == 1
    await running.stop()

    running = await world.start(learning=learning, make=make, keep=2)
    await until_learned(running, 1)
    listed = await artifacts(running)
    assert ([one.version for one in listed.artifacts], listed.serving) == ([1, 3, 4], 1)
    assert (await roll_back(running, 4)).serving.version == 4
    await until_learned(running, 4)
    assert (await roll_back(running, 0)).serving.version == 1
    await until_learned(running, 1)
    await running.stop()


async def test_where_all_are_worse_statistics_answer(world: World, tmp_path: Path) -> None:
    worse = leaves(tmp_path / "worse", untrained(EMOE_A), {"overlap": 0.1, "popularity_overlap": 0.7})
    running = await world.start(learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,)), make=worse)
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(lambda: metric(running, "withheld") == 1)
    await world.until_committed()
    assert (await ask(running)).source == "task type"
    with pytest.raises(grpc.aio.AioRpcError, match="every version of the model 'm' is withheld"):
        await roll_back(running, 0)
    await running.stop()


def metric(running: Running, result: str) -> float:
    return running.metric("trainings_total", kind=EMOE_A, result=result)


async def served(world: World, tmp_path: Path, **changed: Any) -> Running:
    """emoe-a is, and so are statistics."""
    learning = dataclasses.replace(LEARNING, kinds=(EMOE_A,), **changed)
    running = await world.start(learning=learning, make=leaves(tmp_path / "a", untrained(EMOE_A)))
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(lambda: metric(running, "published") == 1)
    await world.until_committed()
    return running


def forgone(running: Running, why: str) -> float:
    return running.metric("learned_forecasts_forgone_total", kind=EMOE_A, why=why)


class Hanging:
    """Forecasts that are made when they may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(
            "greenroom.predictor.kinds.emoe.networks.LearnedPredictor.forecast", lambda *arguments: self.forecast()
        )

    def forecast(self) -> np.ndarray[Any, Any]:
        self.begun.set()
        assert self.go_on.wait(60)
        return np.full((LAYERS, EXPERTS), 1 / EXPERTS, np.float32)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Hanging]]:
    """From when it is called."""
    made: list[Hanging] = []

    def hang() -> Hanging:
        made.append(Hanging(monkeypatch))
        return made[-1]

    yield hang
    for each in made:
        each.go_on.set()


async def test_a_forecast_that_takes_too_long_is_made_by_statistics(
    world: World, tmp_path: Path, hanging: Callable[[], Hanging]
) -> None:
    running = await served(world, tmp_path, forecast_s=0.01)
    hanging()
    assert (await ask(running)).source == "task type"
    assert forgone(running, "late") == 1
    await running.stop()


async def test_the_deadline_of_the_call_counts_and_no_more_wait_than_may(
    world: World, tmp_path: Path, hanging: Callable[[], Hanging]
) -> None:
    running = await served(world, tmp_path, forecast_s=600.0, max_waiting=2)
    hang = hanging()
    request = predictor_pb2.ForecastRequest(model="m", task_type="a", predictor=EMOE_A)
    first = asyncio.create_task(running.service.forecast("m", "a", b"", EMOE_A))
    await world.until(hang.begun.is_set)
    assert (await running.stub.Forecast(request, timeout=4.0)).source == "task type"
    assert (forgone(running, "late"), forgone(running, "crowded")) == (1, 0)
    assert (await running.stub.Forecast(request, timeout=600.0)).source == "task type"
    assert (forgone(running, "late"), forgone(running, "crowded")) == (1, 1)
    hang.go_on.set()
    assert (await first).source == "learned emoe-a"
    await until_learned(running)
    await running.stop()


@pytest.mark.parametrize("found", [None, np.nan])
async def test_a_forecast_that_fails_is_made_by_statistics(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: float | None
) -> None:
    running = await served(world, tmp_path)

    def fail(self: object, task_type: str, previous: object) -> np.ndarray[Any, Any]:
        if found is None:
            raise RuntimeError("no more memory")
        return np.full((LAYERS, EXPERTS), found, np.float32)

    with monkeypatch.context() as patched:
        patched.setattr("greenroom.predictor.kinds.emoe.networks.LearnedPredictor.forecast", fail)
        assert (await ask(running)).source == "task type"
    assert forgone(running, "failed") == 1
    assert (await ask(running)).source == "learned emoe-a"
    await running.stop()


# -- trainers that fail -----------------------------------------------------------------------------------------------


async def test_a_trainer_that_is_killed_is_counted_and_tried_again(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It dies the first time. Forecasts go on, and the next trainer succeeds with later sequences."""
    good = leaves(tmp_path / "artifact", untrained(EMOE_A))
    flag = tmp_path / "tried"
    script = f'test -e {flag} || {{ touch {flag}; kill -9 $$; }}; cp "$0" "$2"'
    make = (*SH, script, good[-1])
    running = await world.start(learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,)), make=make)
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="failed") == 1)
    await world.until_committed()
    assert "ended with -9" in caplog.text
    assert (await ask(running)).source == "task type"
    assert running.service.unready is None
    await world.send(*(sequence(number) for number in range(10, 20)))
    await until_learned(running)
    await running.stop()


async def test_a_trainer_that_hangs_is_killed(world: World, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    running = await world.start(
        learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,), timeout_s=3.0),
        make=(*SH, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"),
    )
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="timed_out") == 1)
    assert not alive(int(pid.read_text()))
    assert (await ask(running)).source == "task type"
    await running.stop()


async def test_the_end_of_the_service_is_the_trainers(world: World, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    running = await world.start(
        learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,)),
        make=(*SH, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"),
    )
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(pid.exists)
    await running.stop()
    assert not alive(int(pid.read_text()))


@pytest.mark.parametrize("left", ["nothing", "rubbish", "another model", "another kind", "no network"])
async def test_what_a_trainer_leaves_is_checked(world: World, tmp_path: Path, left: str) -> None:
    artifact = untrained(EMOE_A)
    wrong = {
        "nothing": (*SH, "exit 0"),
        "rubbish": (*SH, 'echo rubbish > "$1"', "x"),
        "another model": leaves(tmp_path / "a", untrained(EMOE_A, model="other")),
        "another kind": leaves(tmp_path / "b", untrained(EMOE_L)),
        "no network": leaves(tmp_path / "c", dataclasses.replace(artifact, weights={})),
    }
    running = await world.start(learning=dataclasses.replace(LEARNING, kinds=(EMOE_A,)), make=wrong[left])
    await world.send(*(sequence(number) for number in range(10)))
    await world.until(lambda: running.metric("trainings_total", kind=EMOE_A, result="failed") == 1)
    assert list((await artifacts(running)).artifacts) == []
    await running.stop()


async def test_the_last_words_of_a_trainer_are_told() -> None:
    with pytest.raises(JobFailed, match="ended with 3: no more memory"):
        await make_in_subprocess(KIND, job_of(3), timeout_s=60, command=(*SH, "echo no more memory >&2; exit 3"))


KIND = EmoeKind(EMOE_A, LearningConfig())


def job_of(count: int, **options: Any) -> Job:
    """To train on ``count`` sequences."""
    sequences = topics(count, layers=8, experts=64)
    samples = [
        Sample(task, counts[None]) for task, counts in zip(sequences.tasks, sequences.counts, strict=True)
    ]  # fmt: skip
    return Job(EMOE_A, "m", Shape(8, 64), samples, {**KIND.options(), **options})


async def test_a_trainer_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """It is asked to train for very long, and the process that started it is killed."""
    job, pid = tmp_path / "job", tmp_path / "pid"
    job.write_bytes(dump_job(job_of(2000, width=128, depth=8, epochs=10_000, patience=10_000)))
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'greenroom.predictor.kinds.make', sys.argv[1], 'out', "
        "str(os.getpid())])\n"
        "open(sys.argv[2] + '.new', 'w').write(str(child.pid))\n"
        "os.rename(sys.argv[2] + '.new', sys.argv[2])\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(job), str(pid), cwd=tmp_path)
    await until(pid.exists, within_s=DEADLINE_S)
    child = int(pid.read_text())
    await until(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19, within_s=DEADLINE_S)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(child), within_s=DEADLINE_S)  # it looks once a second, at the lowest priority


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


# -- words -------------------------------------------------------------------------------------------------------------


def test_what_to_learn_is_said_in_words() -> None:
    assert learning_of("asked") == LearningConfig()
    assert learning_of("none").off
    assert not learning_of("emoe-a").off
    assert learning_of("emoe-l, emoe-a").kinds == (EMOE_L, EMOE_A)
    assert not learning_of("emoe-a").when_asked
    for wrong in ("", "none,emoe-a", " , "):
        with pytest.raises(InvalidConfig, match="learn"):
            learning_of(wrong)
    with pytest.raises(UnknownName, match="emoe-a, emoe-l"):
        learning_of("emoe-b")


@pytest.mark.parametrize(
    "changed",
    [
        {"after": 3},
        {"again": 0},
        {"max_bytes": 0},
        {"max_sequences": 5},
        {"timeout_s": 0.0},
        {"backbone": "lstm"},
        {"forecast_s": 0.0},
        {"asked_within_s": float("inf")},
        {"tolerance": -0.1},
        {"tolerance": float("nan")},
    ],
)
def test_bounds_that_can_not_be(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        LearningConfig(**changed)


@pytest.mark.parametrize(
    "changed", [{"kind": "x"}, {"backbone": "x"}, {"width": 9}, {"depth": 0}, {"test_share": 0.9}, {"batch": 0}]
)
def test_a_training_that_can_not_be(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        TrainingConfig(**changed)


def test_the_light_part_imports_no_torch() -> None:
    code = (
        "import sys, greenroom.cli.predictor, greenroom.predictor.process\n"
        "import greenroom.predictor.kinds.registry, greenroom.predictor.kinds.emoe.comparison\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_kinds_share_a_folder(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, 3, codec_of(kind), within=kind) for kind in (EMOE_A, EMOE_L)]
    for store in stores:
        assert store.open() == []
    for store, kind in zip(stores, (EMOE_A, EMOE_L), strict=True):
        store.write(untrained(kind))
    for store in stores:
        store.close()
    for kind in (EMOE_A, EMOE_L):
        again = FileStore(tmp_path, 3, codec_of(kind), within=kind)
        (found,) = again.open()
        assert found.architecture.kind == kind
        again.close()
