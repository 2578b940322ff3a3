"""``greenroom predictor`` as a process on a real broker, killed and started again on its state."""

from __future__ import annotations

import asyncio
import signal
import uuid
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from greenroom.cli.building_options import building_from
from greenroom.cli.predictor import predictor
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import MemberKind, encode
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import GrpcDialer
from greenroom.fabric.topics import Topics, all_topics
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from tests.kafka.broker import Broker
from tests.kafka.fixtures import kafka_broker  # noqa: F401
from tests.pipeline.predictor.test_predictor import one
from tests.pipeline.service_process import DEADLINE_S, service_process

NICED_S = 900.0
"""For what hangs. The process that makes artifacts has the lowest priority, and gets little of a busy machine."""


async def test_killed_and_started_again(kafka_broker: Broker, tmp_path: Path) -> None:  # noqa: F811
    prefix = f"p{uuid.uuid4().hex[:8]}."
    state = tmp_path / "state"
    arguments = ["predictor", "--brokers", kafka_broker.address, "--topic-prefix", prefix, "--state-dir", str(state)]
    arguments += ["--publish-every", "16", "--publish-after", "0.1"]
    async with KafkaLog(LogConfig(brokers=(kafka_broker.address,), prefix=prefix)) as log:
        await log.ensure(all_topics(Topics()))

        async def send(start: int, stop: int) -> None:
            for number in range(start, stop):
                await log.append("traces", encode(one(number)), key=f"r{number}".encode())

        async with service_process(arguments, tmp_path / "first.log") as first:
            await send(0, 100)
            async with asyncio.timeout(DEADLINE_S):
                while await first.metric("greenroom_predictor_artifacts_published_total") < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await send(100, 120)
            assert await first.signal(signal.SIGKILL) == -signal.SIGKILL
        await send(0, 10)  # by a worker that tries again
        async with service_process(arguments, tmp_path / "second.log") as second, Directory(log) as directory:
            assert await directory.wait_for(lambda known: len(known.of(MemberKind.PREDICTOR)) > 0, DEADLINE_S)
            address = max(directory.of(MemberKind.PREDICTOR), key=lambda member: _number(second.log, member.address))
            partitions = await log.partitions("traces")
            ends = {number: await log.offset_at("traces", number, 2**60) for number in range(partitions)}
            async with asyncio.timeout(DEADLINE_S):
                while {number: await log.committed("traces", "predictor", number) or 0 for number in ends} != ends:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with GrpcDialer() as dialer:
                stub = dialer.stub(predictor_pb2_grpc.PredictorStub, address.address)
                answer = await stub.Forecast(
                    predictor_pb2.ForecastRequest(model="m", task_type="question"), timeout=DEADLINE_S
                )
            assert (answer.source, answer.sequences) == ("task type", 120)
            assert await second.signal(signal.SIGTERM) == 0, second.log


@pytest.mark.full
@pytest.mark.timeout(2 * NICED_S)
async def test_what_is_learnt_is_served_by_the_process_and_the_next(kafka_broker: Broker, tmp_path: Path) -> None:  # noqa: F811
    """With the real trainer; the next process finds it among what was kept."""
    prefix = f"p{uuid.uuid4().hex[:8]}."
    arguments = ["predictor", "--brokers", kafka_broker.address, "--topic-prefix", prefix, "--publish-after", "0.1"]
    arguments += ["--state-dir", str(tmp_path / "state"), "--learn", "emoe-a", "--learn-after", "12"]
    arguments += ["--learn-tolerance", "1", "--learn-forecast-timeout", "5"]
    async with KafkaLog(LogConfig(brokers=(kafka_broker.address,), prefix=prefix)) as log:
        await log.ensure(all_topics(Topics()))
        for number in range(12):
            await log.append("traces", encode(one(number, number % 3)), key=f"r{number}".encode())
        for name in ("first", "second"):
            async with service_process(arguments, tmp_path / f"{name}.log") as process:
                async with Directory(log) as directory, GrpcDialer() as dialer, asyncio.timeout(NICED_S):
                    members = directory.of(MemberKind.PREDICTOR)
                    address = max(members, key=lambda member: _number(process.log, member.address)).address
                    stub = dialer.stub(predictor_pb2_grpc.PredictorStub, address)
                    request = predictor_pb2.ForecastRequest(model="m", task_type="question", predictor="emoe-a")
                    while (answer := await stub.Forecast(request)).source != "learned emoe-a":  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert (answer.version, answer.layers) == (1, 2)
                assert await process.metric("greenroom_predictor_trainings_total") == (name == "first")
                assert await process.signal(signal.SIGTERM) == 0, process.log


@pytest.mark.full
@pytest.mark.timeout(2 * NICED_S)
async def test_what_is_made_for_expert_policies_outlives_the_process(kafka_broker: Broker, tmp_path: Path) -> None:  # noqa: F811
    """By the real process, once it is asked for; the first process is killed."""
    prefix = f"p{uuid.uuid4().hex[:8]}."
    arguments = ["predictor", "--brokers", kafka_broker.address, "--topic-prefix", prefix, "--publish-after", "0.1"]
    arguments += ["--state-dir", str(tmp_path / "state"), "--eamc-after", "12", "--learn", "none"]
    request = predictor_pb2.ListArtifactsRequest(model="m", kind="eamc")
    get = predictor_pb2.GetArtifactRequest(model="m", kind="eamc")
    files = []
    async with KafkaLog(LogConfig(brokers=(kafka_broker.address,), prefix=prefix)) as log:
        await log.ensure(all_topics(Topics()))
        for name in ("first", "second"):
            async with service_process(arguments, tmp_path / f"{name}.log") as process:
                async with Directory(log) as directory, GrpcDialer() as dialer, asyncio.timeout(NICED_S):
                    members = directory.of(MemberKind.PREDICTOR)
                    address = max(members, key=lambda member: _number(process.log, member.address)).address
                    stub = dialer.stub(predictor_pb2_grpc.PredictorStub, address)
                    await stub.ListArtifacts(request)
                    for number in range(12) if name == "first" else ():
                        await log.append("traces", encode(one(number)), key=f"r{number}".encode())
                    while not (listed := await stub.ListArtifacts(request)).serving:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    files.append(b"".join([part.data async for part in stub.GetArtifact(get)]))
                assert [artifact.version for artifact in listed.artifacts] == [1]
                if name == "first":
                    assert await process.signal(signal.SIGKILL) == -signal.SIGKILL
                else:
                    assert await process.signal(signal.SIGTERM) == 0, process.log
    assert files[0] == files[1]
    assert EamcFile.parse(files[0]).sequences == 12


def _number(log: str, address: str) -> int:
    """Whether it is the address that this process listens on: the killed one's record is still there."""
    return int(address in log)


def test_the_defaults_of_the_options_are_those_of_the_service() -> None:
    options = {one.name: one.get_default(Context(predictor)) for one in predictor.params}
    assert building_from(options) == BuildingConfig()


def test_what_is_to_be_built_is_looked_at_before_anything_runs() -> None:
    for wrong, said in ((["--build", "none,eamc"], "build"), (["--eamc-share", "2"], "eamc_share")):
        result = CliRunner().invoke(predictor, wrong)
        assert result.exit_code != 0
        assert isinstance(result.exception, InvalidConfig)
        assert result.exception.field == said
