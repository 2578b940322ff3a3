"""The newest version of what the expert policy predicts by comes from the predictor, and nothing waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.messages import MemberKind
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from greenroom.worker.generation_engine import ArtifactVersion
from greenroom.worker.service_config import ArtifactConfig
from tests.pipeline.worker.scripted import ScriptedEngine, Stage, staged, until
from tests.pipeline.worker.test_traces_and_forecasts import finish

OFTEN = ArtifactConfig(every_ms=1.0, timeout_ms=1000.0, fetch_ms=1000.0, max_bytes=10_000)


def eamc(version: int, *, created_ms: int | None = None, experts: tuple[int, ...] = (3, 3)) -> EamcFile:
    matrices = np.full((2, sum(experts)), version, np.float32)
    return EamcFile(
        model="scripted",
        experts_per_layer=experts,
        sequences=9,
        matrices=matrices,
        version=version,
        created_ms=1000 * version if created_ms is None else created_ms,
    )


class Shelf(predictor_pb2_grpc.PredictorServicer):
    """Serves the files that it is given, of the kind eamc, in parts of 50 bytes."""

    def __init__(self) -> None:
        self.files: dict[int, EamcFile] = {}
        self.serving = 0
        self.asked = 0
        self.fetched: list[int] = []
        self.fails: grpc.StatusCode | None = None
        self.damage = False

    def serve(self, file: EamcFile) -> None:
        self.files[file.version] = file
        self.serving = file.version

    async def ListArtifacts(self, request: predictor_pb2.ListArtifactsRequest, context: Any) -> Any:
        assert (request.model, request.kind) == ("scripted", "eamc")
        self.asked += 1
        if self.fails is not None:
            await context.abort(self.fails, "trouble")
        infos = [self._info(file) for file in self.files.values()]
        return predictor_pb2.ListArtifactsResponse(artifacts=infos, serving=self.serving)

    async def GetArtifact(
        self, request: predictor_pb2.GetArtifactRequest, context: Any
    ) -> AsyncIterator[predictor_pb2.ArtifactPart]:
        self.fetched.append(request.version)
        file = self.files[request.version]
        data = file.dump()
        info = self._info(file)
        info.checksum = xxhash.xxh3_128_hexdigest(data)
        if self.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        for start in range(0, len(data), 50):
            yield predictor_pb2.ArtifactPart(artifact=None if start else info, data=data[start : start + 50])

    async def Forecast(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def RollBack(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def _info(self, file: EamcFile) -> predictor_pb2.Artifact:
        return predictor_pb2.Artifact(
            version=file.version,
            model=file.model,
            kind=file.KIND,
            created_ms=file.created_ms,
            bytes=len(file.dump()),
            sequences=file.sequences,
        )


def takes(kind: str = "eamc", version: ArtifactVersion | None = None) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.artifacts = {kind: version}
    return engine


async def shelf(stage: Stage) -> Shelf:
    made = Shelf()
    stage.members.add("predictor", await stage.net.serve("predictor", made), MemberKind.PREDICTOR)
    return made


async def asked_again(one: Shelf, times: int = 2) -> None:
    before = one.asked
    await until(lambda: one.asked >= before + times)


@pytest.mark.usefixtures("net")
async def test_each_new_version_is_taken_once_while_requests_go_on() -> None:
    """So is a version that is rolled back to. Schedulers are told which one the worker has."""
    async with staged(takes(), artifacts=OFTEN) as stage:
        predictor = await shelf(stage)
        await asked_again(predictor)
        assert stage.engine.swapped == []
        for version in (1, 2):
            predictor.serve(eamc(version))
            await until(lambda version=version: len(stage.engine.swapped) == version)  # type: ignore[misc]
            await finish(stage, f"r{version}", version)
        assert (stage.engine.swapped[-1].version, stage.engine.swapped[-1].sequences) == (2, 9)
        assert np.array_equal(stage.engine.swapped[-1].arrays["matrices"], eamc(2).matrices)
        predictor.serving = 1
        await until(lambda: len(stage.engine.swapped) == 3)
        await asked_again(predictor)
        assert predictor.fetched == [1, 2, 1]
        assert stage.service.counters.artifacts == 3
        assert (await stage.service.state()).artifacts == {"eamc": "1"}


@pytest.mark.parametrize(("created_ms", "taken"), [(999, False), (1000, False), (1001, True)])
async def test_what_it_began_with_gives_way_to_what_is_newer(created_ms: int, taken: bool) -> None:
    async with staged(takes(version=ArtifactVersion(7, 1000)), artifacts=OFTEN) as stage:
        assert (await stage.service.state()).artifacts == {"eamc": "7"}
        predictor = await shelf(stage)
        predictor.serve(eamc(1, created_ms=created_ms))
        await asked_again(predictor)
        assert len(stage.engine.swapped) == taken
        assert predictor.fetched == [1] * taken


async def test_another_predictors_first_version_is_another_one() -> None:
    """The predictor was started again without what it had kept."""
    async with staged(takes(), artifacts=OFTEN) as stage:
        predictor = await shelf(stage)
        predictor.serve(eamc(1, created_ms=1000))
        await until(lambda: len(stage.engine.swapped) == 1)
        predictor.serve(eamc(1, created_ms=2000))
        await until(lambda: len(stage.engine.swapped) == 2)


def out_of_memory(_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("wrong", ["another model", "damaged", "too large", "there is no memory for it"])
async def test_an_artifact_that_can_not_be_used_is_passed_over(
    wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched once; the next is taken."""
    most = 600 if wrong == "too large" else 10_000
    async with staged(takes(), artifacts=replace(OFTEN, max_bytes=most)) as stage:
        predictor = await shelf(stage)
        predictor.damage = wrong == "damaged"
        if wrong == "there is no memory for it":
            monkeypatch.setattr(stage.engine, "swap", out_of_memory)
        predictor.serve(
            eamc(1, experts=(3, 4) if wrong == "another model" else (3, 3))
            if wrong != "too large"
            else replace(eamc(1), matrices=np.ones((100, 6), np.float32))
        )
        await until(lambda: stage.service.counters.artifacts_refused == 1)
        await asked_again(predictor)
        assert predictor.fetched == [1]
        assert "version 1 is passed over" in caplog.text
        assert stage.engine.swapped == []
        predictor.damage = False
        monkeypatch.undo()
        predictor.serve(eamc(2))
        await until(lambda: len(stage.engine.swapped) == 1)
        assert stage.service.counters.artifacts_failed == 0


async def test_a_predictor_that_is_away_or_fails_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with staged(takes(), artifacts=OFTEN) as stage:
        counters = stage.service.counters
        await until(lambda: counters.artifacts_failed >= 3)
        await finish(stage, "a", 0)
        predictor = await shelf(stage)
        predictor.fails = grpc.StatusCode.UNAVAILABLE
        await asked_again(predictor)
        assert caplog.text.count("goes on with what it has") <= 1, "once, and not every time"
        predictor.fails = None
        predictor.serve(eamc(1))
        await until(lambda: len(stage.engine.swapped) == 1)


async def test_a_predictor_that_is_not_there_yet_is_found_long_before_the_next_time() -> None:
    """A predictor begins to learn when it is first asked."""
    async with staged(takes(), artifacts=replace(OFTEN, every_ms=3_600_000.0, retry_ms=1.0)) as stage:
        await until(lambda: stage.service.counters.artifacts_failed >= 2)
        predictor = await shelf(stage)
        await until(lambda: predictor.asked == 1)


async def test_a_policy_that_takes_none_asks_for_none() -> None:
    async with staged(artifacts=OFTEN) as stage:
        predictor = await shelf(stage)
        await finish(stage, "a", 0)
        assert predictor.asked == 0
    async with staged(takes(), artifacts=replace(OFTEN, every_ms=0.0)) as stage:
        predictor = await shelf(stage)
        await finish(stage, "a", 0)
        assert predictor.asked == 0


async def test_its_address_may_be_given() -> None:
    async with staged(takes(), artifacts=replace(OFTEN, address="elsewhere:1")) as stage:
        elsewhere = Shelf()
        elsewhere.serve(eamc(1))
        await stage.net.serve("elsewhere", elsewhere)
        await until(lambda: len(stage.engine.swapped) == 1)
