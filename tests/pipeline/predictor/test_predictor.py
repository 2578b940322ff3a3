"""Traces in, forecasts out; versions; what crashes and restarts leave."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Member, MemberKind, Trace, decode, encode
from greenroom.fabric.log import LogFailed
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import GrpcDialer, LocalEndpoint, Server, ServerConfig, join_address
from greenroom.predictor import PredictorMetrics, PredictorService, PredictorServicer
from greenroom.predictor import service as service_module
from greenroom.predictor.kinds.statistics.snapshot import SNAPSHOTS, Snapshot, load_snapshot
from greenroom.predictor.process import predictor_parts
from greenroom.predictor.traces.counts import SequenceCounts, count
from greenroom.predictor.versions.artifact import ArtifactInfo
from greenroom.predictor.versions.store import MemoryStore
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from tests.pipeline.predictor.conftest import CONFIG, DEADLINE_S, World
from tests.pipeline.troubled_log import in_turn
from tests.unit.predictor.worlds import World as Routing
from tests.unit.predictor.worlds import f32, trace


def one(number: int, expert: int = 0, task_type: str = "question", model: str = "m") -> Trace:
    """Two layers of four experts; ``expert`` and the one after it."""
    picks = [[[expert], [(expert + 1) % 4]]]
    return trace(picks, 4, request_id=f"r{number}", task_type=task_type, model=model)


# -- forecasts --------------------------------------------------------------------------------------------------------


async def test_nothing_is_known_at_first(world: World) -> None:
    running = await world.start()
    answer, distribution = await running.forecast("question")
    assert (answer.source, answer.version, answer.sequences) == ("uniform", 0, 0)
    assert distribution.shape == (0, 0)
    assert running.metric("forecasts_total", source="uniform") == 1
    assert list((await running.artifacts()).artifacts) == []
    await running.stop()


async def test_a_task_type_then_all_tasks(world: World) -> None:
    running = await world.start(publish_after_s=60.0)
    await world.send(*(one(number, 0, "question") for number in range(6)), one(6, 2, "compare"), one(7, 2, ""))
    await world.until_committed()
    answer, distribution = await running.forecast("question")
    assert (answer.source, answer.version, answer.sequences) == ("task type", 1, 6)
    np.testing.assert_allclose(distribution, [[1, 0, 0, 0], [0, 1, 0, 0]])
    for unknown in ("haiku", ""):
        answer, distribution = await running.forecast(unknown)
        assert (answer.source, answer.sequences) == ("all tasks", 8)
        np.testing.assert_allclose(distribution, [[0.75, 0, 0.25, 0], [0, 0.75, 0, 0.25]], atol=0.01)
    assert running.metric("sequences_total") == 8
    assert running.metric("serving_version", model_name="m") == 1
    await running.stop()


async def test_after_a_previous_prompt(world: World) -> None:
    running = await world.start()
    await world.send(*(one(number, number % 2, "question") for number in range(8)))
    await world.until_committed()
    answer, distribution = await running.forecast("question", f32([[0, 5, 0, 0], [1, 1, 1, 1]]))
    assert answer.source == "previous prompt"
    np.testing.assert_allclose(distribution, [[0, 1, 0, 0], [0, 0, 1, 0]])
    answer, distribution = await running.forecast("haiku", f32([[1, 0, 0, 0], [1, 1, 1, 1]]))
    assert (answer.source, answer.sequences) == ("previous prompt", 8)
    np.testing.assert_allclose(distribution, [[1, 0, 0, 0], [0, 1, 0, 0]])
    await running.stop()


async def test_a_forecast_that_can_not_be_made_says_why(world: World) -> None:
    running = await world.start()
    await world.send(*(one(number) for number in range(8)))
    await world.until_committed()
    for model, previous in (("m", np.ones((3, 3))), ("m", np.zeros((2, 4))), ("", None)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.forecast("question", previous, model=model)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await running.stop()


async def test_forecasts_come_to_what_the_world_is(world: World) -> None:
    """Two task types with routings of their own, on a real server."""
    running = await world.start(publish_every=50)
    routings = {"question": Routing(1, 3, 6), "compare": Routing(2, 3, 6)}
    for number in range(200):
        for name, routing in routings.items():
            await world.send(trace(routing.picks(40), 6, request_id=f"{name}{number}", task_type=name))
    await world.until_committed()
    server = Server(ServerConfig(), [PredictorServicer(running.service, 1000)])
    port = await server.start()
    async with GrpcDialer() as dialer:
        stub = dialer.stub(predictor_pb2_grpc.PredictorStub, join_address("127.0.0.1", port))
        for name, routing in routings.items():
            answer = await stub.Forecast(predictor_pb2.ForecastRequest(model="m", task_type=name), timeout=DEADLINE_S)
            distribution = np.frombuffer(answer.distribution, "<f4").reshape(answer.layers, answer.experts)
            assert np.abs(distribution - routing.marginals()).max() < 0.05
        parts = [
            part async for part in stub.GetArtifact(predictor_pb2.GetArtifactRequest(model="m"), timeout=DEADLINE_S)
        ]
        assert len(parts) > 1
        serving = running.service.registry("").artifacts("m")[1]
        assert parts[0].artifact.version == serving
        assert not any(part.HasField("artifact") for part in parts[1:])
        snapshot = load_snapshot(b"".join(part.data for part in parts))
        assert snapshot.version == serving
        assert sum(len(part.data) for part in parts) == parts[0].artifact.bytes
    await server.stop(1.0)
    await running.stop()


# -- what is not learnt from ------------------------------------------------------------------------------------------


async def test_a_sequence_counts_once(world: World) -> None:
    running = await world.start()
    for _ in range(3):
        await world.send(*(one(number) for number in range(8)))
    await world.until_committed()
    assert running.metric("sequences_total") == 8
    assert running.metric("duplicates_total") == 16
    await running.stop()


async def test_what_can_not_be_learnt_from_is_buried(world: World) -> None:
    running = await world.start()
    await world.send(one(0), b"\xc1", None, one(1))
    await world.send(trace([[[0]]], 9, request_id="other-shape"), trace([[[0], [1]]], 4, request_id="short", rows=7))
    await world.send(one(2, model=""), trace(np.empty((0, 2, 1)), 4, request_id="empty"))
    await world.until_committed()
    await world.until(lambda: running.metric("dead_letters_total") == 5)
    letters = {letter.key: letter for letter in await world.letters()}
    assert "under another name" in letters[b"other-shape"].reason
    assert decode(letters[b"other-shape"].payload or b"", Trace).num_experts == 9
    assert "7 rows" in letters[b"short"].reason
    assert "names no model" in letters[b"r2"].reason
    assert all(letter.service == "predictor" for letter in letters.values())
    assert running.metric("sequences_total") == 2
    assert running.metric("empty_traces_total") == 1
    await running.stop()


async def test_tokens_that_are_not_those_of_the_rows_are_refused_and_kept_nowhere(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not anything is made of tokens."""
    secret = b"\xde\xad\xbe\x0e"
    running = await world.start()
    picks = [[[0], [1]]]
    await world.send(trace(picks, 4, request_id="long", tokens=2 * secret))
    await world.send(trace(picks, 4, request_id="short", rows=7, tokens=7 * secret))
    await world.until_committed()
    await world.until(lambda: running.metric("dead_letters_total") == 2)
    letters = {letter.key: letter for letter in await world.letters()}
    assert "8 bytes of tokens, and 1 rows" in letters[b"long"].reason
    assert all(letter.payload is not None and secret not in letter.payload for letter in letters.values())
    await running.stop()
    files = [path for path in world.folder.rglob("*") if path.is_file()]
    assert not any(secret in path.read_bytes() for path in files)
    assert secret.hex() not in caplog.text


async def test_a_thousand_malformed_payloads(world: World) -> None:
    running = await world.start()
    good = encode(one(0))
    await world.send(*(good[: number % len(good)] + bytes([number % 256]) * 3 for number in range(1000)))
    await world.send(one(1))
    await world.until_committed()
    assert running.metric("sequences_total") >= 1
    assert running.service.unready is None
    running.service.library.audit()
    await running.stop()


async def test_a_dead_letter_that_was_not_sent_keeps_its_payload(world: World) -> None:
    running = await world.start()
    running.log.trouble = in_turn("dead-letters", *["unsent"] * 4)
    await world.send(b"\xc1" * 100)
    await world.until_committed()
    (letter,) = await world.letters()
    assert letter.payload == b"\xc1" * 100
    await running.stop()


async def test_dead_letters_are_written_however_long_it_takes(world: World) -> None:
    running = await world.start()
    running.log.trouble = in_turn("dead-letters", "lost", "refused", "lost", "refused", "lost")
    await world.send(b"\xc1" * 100)
    await world.until_committed()
    (letter,) = await world.letters()
    assert letter.payload is None
    assert "100 bytes" in letter.reason
    assert running.service.unready is None
    await running.stop()


# -- versions ---------------------------------------------------------------------------------------------------------


async def publish(world: World, start: int, expert: int) -> None:
    """One more version, of eight sequences."""
    await world.send(*(one(number, expert) for number in range(start, start + 8)))
    await world.until_committed()


async def test_a_version_after_so_many_sequences_or_so_long(world: World) -> None:
    running = await world.start(publish_after_s=60.0)
    await publish(world, 0, 0)
    assert [(one.version, one.sequences) for one in (await running.artifacts()).artifacts] == [(1, 8)]
    await world.send(one(8))
    await world.until(lambda: running.metric("sequences_total") == 9)
    assert running.metric("unsaved_sequences") == 1
    await running.stop()
    running = await world.start(publish_after_s=0.01)
    listed = await running.artifacts()
    assert [(one.version, one.sequences) for one in listed.artifacts] == [(1, 8), (2, 9)]
    await world.send(one(9))
    await world.until_committed()
    assert [one.version for one in (await running.artifacts()).artifacts] == [1, 2, 3]
    await running.stop()


async def test_rolling_back(world: World) -> None:
    running = await world.start(half_life_sequences=1.0, publish_after_s=60.0)
    await publish(world, 0, 0)
    await publish(world, 8, 2)
    assert (await running.forecast("question"))[0].version == 2
    answer = await running.roll_back(1)
    assert (answer.serving.version, answer.serving.sequences) == (1, 8)
    first, distribution = await running.forecast("question")
    assert first.version == 1
    np.testing.assert_allclose(distribution[0], [1, 0, 0, 0])
    # It stays, whatever is published, and across restarts.
    await publish(world, 16, 3)
    assert (await running.forecast("question"))[0].version == 1
    await running.stop()
    running = await world.start(publish_after_s=60.0)
    assert (await running.forecast("question"))[0].version == 1
    listed = await running.artifacts()
    assert ([one.version for one in listed.artifacts], listed.serving) == ([1, 2, 3], 1)
    # 0: the newest again, and those after it.
    assert (await running.roll_back(0)).serving.version == 3
    await publish(world, 24, 1)
    assert (await running.forecast("question"))[0].version == 4
    for version, model in ((9, "m"), (1, "other")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.roll_back(version, model)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await running.forecast("question"))[0].version == 4
    await running.stop()


async def test_an_artifact_that_is_not_kept(world: World) -> None:
    running = await world.start()
    for model, version in (("m", 0), ("m", 3)):
        request = predictor_pb2.GetArtifactRequest(model=model, version=version)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [part async for part in running.stub.GetArtifact(request, timeout=DEADLINE_S)]
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await running.stop()


async def test_old_versions_go(world: World) -> None:
    running = await world.start(keep=2)
    for start in range(0, 40, 8):
        await publish(world, start, 0)
    kept = [one.version for one in (await running.artifacts()).artifacts]
    assert len(kept) == 2
    assert len(list(world.folder.glob("*/*.safetensors"))) == 2
    assert (await running.artifacts()).serving == kept[-1]
    await running.stop()


# -- restarts and crashes ---------------------------------------------------------------------------------------------


async def test_a_restart_forecasts_the_same(world: World) -> None:
    running = await world.start()
    routing = Routing(3, 4, 8)
    await world.send(*(trace(routing.picks(9), 8, request_id=str(n), task_type="ab"[n % 2]) for n in range(30)))
    await world.until_committed()
    previous = routing.marginals()
    before = [await running.forecast(*asked) for asked in (("a",), ("b",), ("c",), ("a", previous))]
    await running.stop()
    running = await world.start()
    after = [await running.forecast(*asked) for asked in (("a",), ("b",), ("c",), ("a", previous))]
    for (answer, distribution), (again, same) in zip(before, after, strict=True):
        assert answer == again
        np.testing.assert_array_equal(distribution, same)
    await running.stop()


@pytest.mark.parametrize("crash_at", range(1, 8))
async def test_a_crash_loses_nothing_and_counts_nothing_twice(world: World, crash_at: int) -> None:
    """It is killed between keeping a version and the commit, or elsewhere. Every sequence counts once in the end."""
    published = 0

    def crash() -> None:
        nonlocal published
        published += 1
        if published == crash_at:
            world.instances[-1].log.dead = True
            raise _Killed

    first = await world.start(after_publish=crash, publish_after_s=0.001)
    sending = asyncio.create_task(_trickle(world, 60))
    with pytest.raises(_Killed):
        await asyncio.wait_for(first.task, DEADLINE_S)
    second = await world.start(publish_after_s=0.001)
    await world.until(lambda: second.metric("sequences_total") > 2 or sending.done())
    await second.kill()
    await sending
    last = await world.start()
    await world.until_committed()
    known = last.service.library.models["m"]
    assert known.everything.sequences == 60
    assert known.tasks["question"].sequences == 60
    await last.stop()


async def _trickle(world: World, count: int) -> None:
    for number in range(count):
        await world.send(one(number))
        await asyncio.sleep(0.002)


async def test_the_newest_intact_version_is_taken_up(world: World, caplog: pytest.LogCaptureFixture) -> None:
    running = await world.start(publish_after_s=60.0)
    await publish(world, 0, 0)
    await publish(world, 8, 2)
    await running.stop()
    newest = max(world.folder.glob("*/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        running = await world.start(publish_after_s=60.0)
    assert newest.name in caplog.text
    answer, _ = await running.forecast("question")
    assert (answer.version, answer.sequences) == (1, 8)
    await publish(world, 16, 1)
    assert (await running.forecast("question"))[0].version == 3
    await running.stop()


async def test_nothing_is_committed_while_nothing_can_be_kept(world: World) -> None:
    store = FullDisk(3, SNAPSHOTS)
    running = await world.start(store=store, max_unsaved=16, seen_window=64)
    await world.send(*(one(number) for number in range(40)))
    await world.until(lambda: "No space left" in (running.service.unready or ""))
    await world.until(lambda: running.metric("unsaved_sequences") == 16)
    failures = running.metric("artifact_failures_total")
    await world.until(lambda: running.metric("artifact_failures_total") > failures + 3)
    assert running.metric("unsaved_sequences") == 16
    assert await world.committed() == 0
    store.full = False
    await world.until_committed()
    assert running.service.unready is None
    assert running.service.library.models["m"].everything.sequences == 40
    await running.stop()


async def test_what_is_read_again_waits_for_its_version_too(world: World) -> None:
    """The partitions leave and come back before anything could be kept. The copies are known, and are not committed."""
    store = FullDisk(3, SNAPSHOTS)
    running = await world.start(store=store, revoke_s=0.01)
    await world.send(*(one(number) for number in range(6)))
    await world.until(lambda: running.metric("sequences_total") == 6)
    async with world.log.group("traces", "predictor", Idle()):
        pass
    await world.until(lambda: running.metric("duplicates_total") >= 6)
    failures = running.metric("artifact_failures_total")
    await world.until(lambda: running.metric("artifact_failures_total") > failures + 2)
    assert await world.committed() == 0
    store.full = False
    await world.until_committed()
    assert running.service.library.models["m"].everything.sequences == 6
    await running.stop()


async def test_what_is_read_again_while_its_version_is_written_waits_for_it(world: World) -> None:
    """That version then can not be kept, so nothing of it may be committed."""
    store = SlowDisk(keep=3)
    running = await world.start(store=store, revoke_s=0.01, publish_every=6)
    await world.send(*(one(number) for number in range(6)))
    await world.until(store.writing.is_set)
    async with world.log.group("traces", "predictor", Idle()):
        pass
    await world.until(lambda: running.metric("duplicates_total") >= 6)
    store.go_on.set()
    await world.until(lambda: running.metric("artifact_failures_total") >= 2)
    assert await world.committed() == 0
    store.full = False
    await world.until_committed()
    assert running.service.library.models["m"].everything.sequences == 6
    await running.stop()


async def test_stopping_is_bounded_when_nothing_can_be_kept(world: World) -> None:
    running = await world.start(store=FullDisk(3, SNAPSHOTS))
    await world.send(one(0))
    await world.until(lambda: running.metric("artifact_failures_total") > 0)
    running.service.end(0.05)
    await asyncio.wait_for(running.task, DEADLINE_S)
    assert await world.committed() == 0


async def test_what_is_forgotten_is_counted_and_its_files_go(world: World) -> None:
    entry = 2048 + 4 * (2 + 4) * 4
    running = await world.start(max_bytes=8 * entry)
    await world.send(*(one(number, model="old") for number in range(8)))
    await world.until_committed()
    assert (await running.forecast("question", model="old"))[0].version >= 1  # by what had come when it was written
    await world.send(*(one(number, task_type=f"t{number}") for number in range(10)))
    await world.until_committed()
    assert running.metric("evicted_total", what="model") == 1
    assert running.metric("evicted_total", what="task_type") >= 3
    assert (await running.forecast("question", model="old"))[0].source == "uniform"
    assert len(list(world.folder.glob("*/*.safetensors"))) == len((await running.artifacts()).artifacts)
    assert running.registry.get_sample_value("greenroom_predictor_serving_version", {"model_name": "old"}) is None
    await running.stop()


async def test_a_partition_that_moves_is_not_counted_again_by_the_first(world: World) -> None:
    """A second predictor with its own folder joins and leaves. What it read is committed. The first knows the rest."""
    first = await world.start()
    await world.send(*(one(number) for number in range(20)))
    second = await world.start(state_dir=world.folder.with_name("second"))
    await world.send(*(one(number) for number in range(20, 40)))
    await world.until_committed()
    await second.stop()
    await world.send(*(one(number) for number in range(40, 60)))
    await world.until_committed()
    counted = [each.service.library.models["m"].everything.sequences for each in (first, second)]
    assert sum(counted) == 60
    await first.stop()


async def test_what_was_polled_before_its_partition_went_is_not_learnt_when_it_comes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is held up while its partition goes. The rest of that batch is read again under the new assignment."""
    counting, go_on = threading.Event(), threading.Event()

    def slowly(read: Trace) -> SequenceCounts:
        counting.set()
        assert go_on.wait(DEADLINE_S)
        return count(read)

    running = await world.start(revoke_s=0.01)
    monkeypatch.setattr(service_module, "count", slowly)
    await world.send(*(one(number) for number in range(8)))
    await world.until(counting.is_set)
    async with world.log.group("traces", "predictor", Idle()):
        pass
    await world.broker.group("traces", "predictor").close()  # all partitions have come back
    go_on.set()
    await world.until_committed()
    assert running.metric("sequences_total") == 8
    await running.stop()


# -- as a process -----------------------------------------------------------------------------------------------------


async def test_it_is_found_among_the_members(world: World) -> None:
    service = PredictorService(CONFIG, world.log, PredictorMetrics(CollectorRegistry()))
    parts = predictor_parts(service, CONFIG, world.log, LocalEndpoint(world.dialer, "here"), "p.1")
    for part in parts:
        await part.start()
    async with Directory(world.log) as directory:
        (member,) = directory.of(MemberKind.PREDICTOR)
        assert (member.instance, member.address, member.draining) == ("p.1", "here", False)
        stub = world.dialer.stub(predictor_pb2_grpc.PredictorStub, member.address)
        answer = await stub.Forecast(predictor_pb2.ForecastRequest(model="m"), timeout=DEADLINE_S)
        assert answer.source == "uniform"
        for part in reversed(parts):
            await part.drain(1.0)
        assert await directory.wait_for(lambda known: _draining(known.get("p.1")), DEADLINE_S)
        for part in reversed(parts):
            await part.stop()
        assert await directory.wait_for(lambda known: known.gone("p.1"), DEADLINE_S)


async def test_what_keeps_it_from_starting_is_raised(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    config = dataclasses.replace(CONFIG, state_dir=tmp_path / "file")
    service = PredictorService(config, world.log, PredictorMetrics(CollectorRegistry()))
    with pytest.raises(InvalidConfig, match="state_dir"):
        await service.start()
    assert "state_dir" in caplog.messages[-1]
    assert not any(record.exc_info for record in caplog.records), "a sentence is enough"


async def test_a_log_that_failed_ends_it(world: World) -> None:
    running = await world.start()
    await publish(world, 0, 0)
    await running.stop()
    await world.send(*(one(number) for number in range(8, 40)))
    for partition in range(2):
        end = await world.log.offset_at("traces", partition, 2**60)
        world.broker.delete_records("traces", partition, end)
    failing = await world.start()
    with pytest.raises(LogFailed):
        await asyncio.wait_for(failing.task, DEADLINE_S)


class _Killed(Exception):
    """Stands for a process that ends there."""


class Idle:
    """Takes partitions and does nothing with them."""

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        pass

    async def revoked(self, partitions: Sequence[int]) -> None:
        pass


class FullDisk(MemoryStore[Snapshot]):
    full = True

    def write(self, snapshot: Snapshot) -> ArtifactInfo:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(snapshot)


def _draining(member: Member | None) -> bool:
    return member is not None and member.draining


class SlowDisk(FullDisk):
    """``writing``: it was asked to write; it goes on when ``go_on`` is set."""

    def __init__(self, keep: int) -> None:
        super().__init__(keep, SNAPSHOTS)
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def write(self, snapshot: Snapshot) -> ArtifactInfo:
        self.writing.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().write(snapshot)
