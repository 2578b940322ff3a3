"""Artifacts of expert policies are made of live traces, kept and handed out. Then what goes wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Trace
from greenroom.predictor import PredictorServicer
from greenroom.predictor.kinds.config import BuildingConfig, DriftConfig
from greenroom.predictor.kinds.registry import building_of
from greenroom.predictor.making.job import load_job
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from tests.pipeline.predictor.conftest import DEADLINE_S, REAL, Running, World
from tests.pipeline.predictor.test_learned import SH, alive
from tests.pipeline.worker.scripted import NETS
from tests.unit.predictor.worlds import trace

EAMC, REUSE = EamcFile.KIND, ReuseFile.KIND
LAYERS, EXPERTS, ROWS = 2, 6, 4
DRIFT = DriftConfig(after=5, again=1000, settle=3)
BUILDING = BuildingConfig(kinds=(EAMC,), drift=DRIFT, capacity=4, timeout_s=DEADLINE_S, retry_s=0.01, max_retry_s=0.05)
OFF = building_of("none")


def sequence(number: int, recall: float | None = None, *, rows: int = ROWS, **fields: Any) -> Trace:
    """Each of other routing than its neighbours."""
    random = np.random.default_rng(number)
    picks = random.random((rows, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :1]
    report = {} if recall is None else {"prefetch_recall": recall}
    return trace(picks, EXPERTS, request_id=f"r{number}", report=report, **fields)


def leaves(path: Path, file: ArtifactFile) -> Sequence[str]:
    """A command that leaves ``file``, whatever it is given."""
    path.write_bytes(file.dump())
    return (*SH, 'cp "$0" "$2"', str(path))


def watched(folder: Path) -> Sequence[str]:
    """A command that keeps what it is given, as files 1, 2, and so on."""
    copies = f'n=1; while test -e "{folder}/$n"; do n=$((n+1)); done; cp "$1" "{folder}/$n"; cp "$0" "$2"'
    *_, file = leaves(folder / "file", eamc())
    return (*SH, copies, file)


def eamc(model: str = "m", experts: tuple[int, ...] = (EXPERTS,) * LAYERS) -> EamcFile:
    return EamcFile(
        model=model, experts_per_layer=experts, sequences=1, matrices=np.ones((1, sum(experts)), np.float32)
    )  # fmt: skip


def builds(running: Running, result: str = "published", kind: str = EAMC) -> float:
    return running.metric("builds_total", kind=kind, result=result)


def another_than(running: Running, before: float) -> bool:
    return builds(running) > before


async def get(
    stub: predictor_pb2_grpc.PredictorStub, kind: str = EAMC, version: int = 0
) -> tuple[predictor_pb2.Artifact, bytes]:
    request = predictor_pb2.GetArtifactRequest(model="m", kind=kind, version=version)
    parts = [part async for part in stub.GetArtifact(request, timeout=DEADLINE_S)]
    return parts[0].artifact, b"".join(part.data for part in parts)


async def first_version(world: World, **changed: Any) -> Running:
    """A predictor that has made an EAMC of five sequences that nothing was foreseen of."""
    make = leaves(world.folder.with_name("file"), eamc())
    running = await world.start(**{"building": BUILDING, "make": make, **changed})
    await world.send(*(sequence(number) for number in range(5)))
    await world.until(lambda: builds(running) == 1)
    return running


# -- made and handed out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", sorted(NETS))
async def test_a_collection_is_made_of_traces_and_handed_out(world: World, wire: str) -> None:
    """The real process makes it. It is handed out in parts, over both wires."""
    running = await first_version(world, part_bytes=100, make=REAL)
    net = NETS[wire]()
    try:
        address = await net.serve("predictor", PredictorServicer(running.service, 100))
        stub: predictor_pb2_grpc.PredictorStub = net.dialer.stub(predictor_pb2_grpc.PredictorStub, address)
        listed = await stub.ListArtifacts(
            predictor_pb2.ListArtifactsRequest(model="m", kind=EAMC), timeout=DEADLINE_S
        )  # fmt: skip
        assert ([one.version for one in listed.artifacts], listed.serving) == ([1], 1)
        described, data = await get(stub)
        assert (described.kind, described.version, described.model, described.sequences) == (EAMC, 1, "m", 5)
        assert described.bytes == len(data) > 100
        assert described.checksum == xxhash.xxh3_128_hexdigest(data)
        assert (await get(stub, version=1))[1] == data
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await get(stub, version=2)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        await net.close()
    found = EamcFile.parse(data)
    assert (found.model, found.version, found.experts_per_layer) == ("m", 1, (EXPERTS,) * LAYERS)
    assert len(found.matrices) == 4
    assert (found.matrices.reshape(4, LAYERS, EXPERTS).sum(axis=2) == ROWS).all(), "members are whole sequences"
    assert running.metric("serving_built_version", model_name="m", kind=EAMC) == 1
    assert running.metric("recorded_sequences_total", kind=EAMC, recall="low") == 5
    await running.stop()


async def test_sequences_that_were_foreseen_badly_make_a_new_one(world: World, tmp_path: Path) -> None:
    """It is made of those and the others, once there are enough of them."""
    running = await first_version(world, make=watched(tmp_path))
    good = [sequence(number, 0.8) for number in range(5, 15)]
    bad = [sequence(number, 0.5) for number in range(15, 20)]
    for some in (good, bad[:-1]):
        await world.send(*some)
        await world.until_committed()
    assert builds(running) == 1
    await world.send(bad[-1])
    await world.until(lambda: builds(running) == 2)
    await world.until_committed()
    job = load_job((tmp_path / "2").read_bytes())
    assert (len(job.samples), job.recorded) == (20, 5)
    assert job.earlier == b"", "all that it was made of are here"
    assert running.metric("recorded_sequences_total", kind=EAMC, recall="other") == 10
    await world.send(*(sequence(number, 0.5) for number in range(20, 40)))
    await world.until_committed()
    assert builds(running) == 2, "that is usual now"
    await running.stop()


async def test_what_was_foreseen_by_another_version_says_nothing_of_this_one(world: World) -> None:
    """Workers that have not swapped yet may send many such sequences."""
    running = await first_version(world)
    served = EamcFile.parse((await get(running.stub))[1]).created_ms
    for numbers, recall, used in (
        (range(5, 15), 0.1, served - 1),
        (range(15, 18), 0.9, served),  # what is usual is not 0.1
        (range(18, 22), 0.5, served),
        (range(22, 30), 0.5, served - 1),
    ):
        await world.send(*(sequence(number, recall, artifacts={EAMC: used}) for number in numbers))
        await world.until_committed()
    assert builds(running) == 1
    assert running.metric("recorded_sequences_total", kind=EAMC, recall="low") == 5 + 4
    await world.send(sequence(30, 0.5, artifacts={EAMC: served}))
    await world.until(lambda: builds(running) == 2)
    await running.stop()


async def test_an_artifact_that_is_not_asked_for_is_not_made(world: World) -> None:
    """Nothing is kept for it either. To list or get artifacts of a kind is to ask for it."""
    asked = dataclasses.replace(BUILDING, kinds=())
    running = await world.start(building=asked, make=leaves(world.folder.with_name("file"), eamc()))
    await world.send(*(sequence(number) for number in range(6)))
    await world.until_committed()
    assert running.service.policies.keeping("m") == []
    assert running.metric("building_sequences") == 0
    assert list((await running.artifacts(kind=EAMC)).artifacts) == []
    assert [kind.name for kind in running.service.policies.keeping("m")] == [EAMC]
    assert running.service.policies.keeping("other") == []
    await world.send(*(sequence(number) for number in range(6, 11)))
    await world.until(lambda: builds(running) == 1)
    assert builds(running, kind=REUSE) == 0
    await running.stop()


async def test_none_makes_nothing_and_hands_out_what_was_kept(world: World) -> None:
    running = await first_version(world)
    await running.stop()
    running = await world.start(building=OFF)
    assert (await running.artifacts(kind=EAMC)).serving == 1
    await world.send(*(sequence(number) for number in range(5, 30)))
    await world.until_committed()
    assert running.metric("building_sequences") == 0
    await running.stop()


async def test_coefficients_are_fitted_after_so_many_sequences(world: World) -> None:
    """A sequence that contradicts itself is left out. It would spoil the fit for as long as it is kept."""
    running = await world.start(building=dataclasses.replace(BUILDING, kinds=(REUSE,), reuse_after=10))
    await world.send(trace([[[1, 1], [2, 3]]], EXPERTS, request_id="twice"))
    await world.until(lambda: running.metric("unbuildable_total") == 1)
    await world.send(*(sequence(number, rows=80) for number in range(9)))
    await world.until_committed()
    assert [kind.name for kind in running.service.policies.keeping("m")] == [REUSE]
    await world.send(sequence(9, rows=80))
    await world.until(lambda: builds(running, kind=REUSE) == 1)
    described, data = await get(running.stub, REUSE)
    assert described.sequences == 10
    assert ReuseFile.parse(data).experts_per_layer == (EXPERTS,) * LAYERS
    assert list((await running.artifacts(kind=EAMC)).artifacts) == []
    await running.stop()


# -- kept --------------------------------------------------------------------------------------------------------------


async def test_versions_restarts_and_rolling_back(world: World) -> None:
    running = await first_version(world, make=REAL)
    await world.until_committed()
    _, before = await get(running.stub)
    await running.stop()

    running = await world.start(building=BUILDING)
    assert (await get(running.stub))[1] == before
    await world.send(*(sequence(number, 0.9) for number in range(5, 8)))
    await world.until_committed()
    await world.send(*(sequence(number, 0.1) for number in range(8, 13)))
    await world.until(lambda: builds(running) == 1)
    second = EamcFile.parse((await get(running.stub))[1])
    assert (second.version, second.report["earlier"]) == (2, 2), "those before stand for what was seen before"
    assert second.sequences == 2 * 5, "as many others as were recorded"
    assert (await running.roll_back(1, kind=EAMC)).serving.version == 1
    assert (await get(running.stub))[1] == before
    assert (await running.roll_back(0, kind=EAMC)).serving.version == 2
    await world.until_committed()
    await running.kill()

    running = await world.start(building=BUILDING)
    listed = await running.artifacts(kind=EAMC)
    assert ([one.version for one in listed.artifacts], listed.serving) == ([1, 2], 2)
    await running.stop()


async def test_what_was_kept_stands_for_what_is_gone_and_what_is_built_from_now_on_does_not(
    world: World, tmp_path: Path
) -> None:
    """Otherwise the sequences that it is made of, which are still here, would count twice."""
    running = await first_version(world, make=REAL)
    await world.until_committed()
    await running.stop()
    running = await world.start(building=BUILDING, make=watched(tmp_path))
    for first in (5, 13):
        before = builds(running)
        await world.send(*(sequence(number, 0.9) for number in range(first, first + 3)))
        await world.until_committed()
        await world.send(*(sequence(number, 0.1) for number in range(first + 3, first + 8)))
        await world.until(partial(another_than, running, before))
        earlier = load_job((tmp_path / f"{builds(running):.0f}").read_bytes()).earlier
        found = EamcFile.parse(earlier)
        assert (found.version, len(found.matrices)) == (1, 4)
    await running.stop()


async def test_a_damaged_one_is_passed_over(world: World, caplog: pytest.LogCaptureFixture) -> None:
    running = await first_version(world)
    await world.until_committed()
    await running.stop()
    (path,) = world.folder.glob(f"*/{EAMC}/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    running = await world.start(building=BUILDING)
    assert path.name in caplog.text
    assert (await running.artifacts(kind=EAMC)).serving == 0
    await running.stop()


async def test_what_is_forgotten_takes_its_artifacts_with_it(world: World) -> None:
    room = 8 * (2048 + 4 * (LAYERS + (LAYERS - 1) * EXPERTS) * EXPERTS)
    running = await first_version(world, max_bytes=room)
    assert running.metric("serving_built_version", model_name="m", kind=EAMC) == 1
    await world.until_committed()
    others = (sequence(number, model="other", task_type=f"t{number}") for number in range(50, 60))
    await world.send(*others)
    await world.until(lambda: running.metric("evicted_total", what="model") == 1)
    await world.until_committed()
    # What was committed may have begun to be kept before this one was forgotten; the next time it is deleted.
    served = "greenroom_predictor_serving_built_version", {"model_name": "m", "kind": EAMC}
    await world.until(lambda: running.registry.get_sample_value(*served) is None)
    assert list((await running.artifacts(kind=EAMC)).artifacts) == []
    assert list(world.folder.glob(f"m-*/{EAMC}/*.safetensors")) == []
    await running.stop()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_a_builder_that_is_killed_leaves_nothing_and_is_tried_again(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag, seen = tmp_path / "flag", tmp_path / "seen"
    _, _, _, file = leaves(tmp_path / "file", eamc())
    script = f'echo "$2" >> {seen}; test -e {flag} || {{ touch {flag}; echo half > "$2"; kill -9 $$; }}; cp "$0" "$2"'
    running = await world.start(building=BUILDING, make=(*SH, script, file))
    await world.send(*(sequence(number) for number in range(5)))
    await world.until(lambda: builds(running) == 1)
    assert builds(running, "failed") == 1
    assert "ended with -9" in caplog.text
    assert (await running.artifacts(kind=EAMC)).serving == 1
    folders = [Path(line).parent for line in seen.read_text().split()]
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    assert running.service.unready is None
    await running.stop()


async def test_a_builder_that_hangs_is_killed_and_so_is_one_at_the_end(world: World, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    building = dataclasses.replace(BUILDING, timeout_s=1.0)
    running = await world.start(building=building, make=(*SH, f"echo $$ >> {pids}; exec sleep 600"))
    await world.send(*(sequence(number) for number in range(5)))
    await world.until(lambda: builds(running, "timed_out") == 1)
    await world.until(lambda: len(pids.read_text().split()) == 2)  # it is tried again
    await running.stop()
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize("left", ["nothing", "rubbish", "another model", "another kind", "another shape"])
async def test_what_a_builder_leaves_is_checked(world: World, tmp_path: Path, left: str) -> None:
    reuse = ReuseFile(
        model="m",
        experts_per_layer=(EXPERTS,) * LAYERS,
        sequences=1,
        keep=np.full(1, 0.5, np.float32),
        weights=np.zeros((LAYERS, 2), np.float32),
        bias=np.zeros(LAYERS * EXPERTS, np.float32),
        followers=np.zeros(0, np.float32),
    )
    wrong: Mapping[str, Sequence[str]] = {
        "nothing": (*SH, "exit 0"),
        "rubbish": (*SH, 'echo rubbish > "$1"', "x"),
        "another model": leaves(tmp_path / "a", eamc("other")),
        "another kind": leaves(tmp_path / "b", reuse),
        "another shape": leaves(tmp_path / "c", eamc(experts=(EXPERTS,))),
    }
    running = await world.start(building=BUILDING, make=wrong[left])
    await world.send(*(sequence(number) for number in range(5)))
    await world.until(lambda: builds(running, "failed") >= 1)
    assert list((await running.artifacts(kind=EAMC)).artifacts) == []
    await running.stop()


async def test_without_the_library_it_says_so_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "faiss" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(InvalidConfig, match=r"faiss is not installed.*greenroom\[eamc\]"):
        await world.start(building=BUILDING)
    running = await world.start(building=dataclasses.replace(BUILDING, kinds=()))
    for _ in range(3):
        await running.artifacts(kind=EAMC)
    await world.send(*(sequence(number) for number in range(6)))
    await world.until_committed()
    assert caplog.text.count("faiss is not installed") == 1
    assert running.metric("building_sequences") == 0
    await running.stop()
