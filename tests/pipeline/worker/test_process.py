"""`greenroom worker` as a process on a real Kafka log, with a scheduler and a gateway of a few lines around it."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import pytest

from greenroom.core.generation import SamplingParams
from greenroom.core.messages import Member, MemberKind, Trace, decode, encode
from greenroom.demo import bundled_model_path
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.topics import MEMBERS, Topics, all_topics
from greenroom.text.digest import text_digest
from greenroom.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.integration.cluster import Process
from tests.kafka.broker import Broker, free_port
from tests.kafka.fixtures import kafka_broker as kafka_broker
from tests.pipeline.worker.scripted import SCHEDULER, Gateway, GrpcNet, lease_messages, run_request, task_of, until
from tests.waiting import DEADLINE_S

START_S = 120.0


@dataclass
class Around:
    """A worker's process, and what it speaks to."""

    process: Process
    log: KafkaLog
    directory: Directory
    member: Member
    stub: worker_pb2_grpc.WorkerStub
    gateway: Gateway

    def run(self, name: str, length: int) -> grpc.aio.UnaryUnaryCall[object, worker_pb2.RunResponse]:
        task = task_of(name, prompt=range(5, 25), length=length)
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        task = msgspec.structs.replace(task, request=msgspec.structs.replace(task.request, sampling=sampling))
        self.gateway.expect(name)
        return self.stub.Run(run_request(task, self.member.instance, epoch=1, n=0))  # type: ignore[return-value]


@asynccontextmanager
async def worker(broker: Broker, folder: Path, cache: Path, **environment: str) -> AsyncIterator[Around]:
    prefix, probes, listens = f"w{uuid.uuid4().hex[:6]}.", free_port(), free_port()
    arguments = ["worker", "--brokers", broker.address, "--topic-prefix", prefix, "--probe-port", str(probes)]
    arguments += ["--listen", f"127.0.0.1:{listens}", "--threads", "1", "--dtype", "float32", "--expert-memory", "33%"]
    arguments += ["--drain-timeout", "1"]
    process = Process(
        "worker",
        arguments,
        health=f"http://127.0.0.1:{probes}/health",
        folder=folder,
        environment={"GREENROOM_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )
    net = GrpcNet()
    gateway = Gateway("gateway", net)
    await gateway.serve()
    async with KafkaLog(LogConfig(brokers=(broker.address,), prefix=prefix)) as log:
        await log.ensure(all_topics(Topics()))
        here = Member(member=MemberKind.GATEWAY, instance="gateway", address=gateway.address, ttl_ms=60_000)
        announcer = Announcer(log, lambda: here)
        await announcer.start()
        scheduler = Member(member=MemberKind.SCHEDULER, instance=SCHEDULER, address="", ttl_ms=600_000)
        await log.append(MEMBERS, encode(scheduler), key=SCHEDULER.encode())
        process.start()
        async with Directory(log) as directory:
            try:
                async with asyncio.timeout(START_S):
                    while not await directory.wait_for(lambda known: bool(known.of(MemberKind.WORKER)), 1.0):
                        assert process.running, process.log()
                (member,) = directory.of(MemberKind.WORKER)
                stub: worker_pb2_grpc.WorkerStub = net.dialer.stub(worker_pb2_grpc.WorkerStub, member.address)
                lease = asyncio.create_task(_lease(stub, member.instance), name="lease")
                try:
                    yield Around(process, log, directory, member, stub, gateway)
                finally:
                    lease.cancel()
                    await asyncio.gather(lease, return_exceptions=True)
            finally:
                await announcer.stop()
                await net.close()
                if process.running:
                    process.kill()


async def _lease(stub: worker_pb2_grpc.WorkerStub, instance: str) -> None:
    """Grants whatever is asked."""
    grants: asyncio.Queue[worker_pb2.LeaseFromScheduler] = asyncio.Queue()
    call = stub.Lease(lease_messages(grants, instance, epoch=1, lease_ms=3_000))
    try:
        async for asked in call:
            grants.put_nowait(
                worker_pb2.LeaseFromScheduler(grant=worker_pb2.LeaseGrant(sequence=asked.sequence, epoch=1))
            )
    except grpc.aio.AioRpcError:
        pass  # it has ended
    finally:
        call.cancel()


async def first_trace(log: KafkaLog) -> Trace:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for partition in range(await log.partitions("traces")):
                async with log.reader("traces", partition) as reader:
                    for record in await reader.poll(0.1):
                        trace: Trace = decode(record.value or b"", Trace)
                        return trace


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


async def test_it_comes_runs_gives_back_and_leaves(kafka_broker: Broker, tmp_path: Path, cache: Path) -> None:
    async with worker(kafka_broker, tmp_path, cache) as around:
        assert around.member.model is not None
        assert around.member.model.name == "greenroom-understudy"
        assert around.member.model.text_digest == text_digest(bundled_model_path())
        await until(lambda: around.process.ready)
        done = await around.run("done", 8)
        assert done.result.reason == common_pb2.END_REASON_LENGTH
        assert len(done.result.token_ids) == 8
        await until(lambda: around.gateway.got["done"] == list(done.result.token_ids))
        trace = await first_trace(around.log)
        assert (trace.request_id, trace.rows, trace.prompt_rows) == ("done", 27, 20)

        running = around.run("running", 900)
        await until(lambda: len(around.gateway.got["running"]) > 3)
        os.kill(around.process.pid, signal.SIGTERM)
        left = await running
        assert left.closed.why == worker_pb2.RunClosed.WHY_GIVEN_BACK
        assert await asyncio.to_thread(around.process.wait_end) == 0, around.process.log()
        assert await around.directory.wait_for(lambda known: known.gone(around.member.instance), DEADLINE_S)
        assert "Traceback" not in around.process.log()
    assert "resident.json" in str(os.listdir(cache / "packs")), "the resident experts are remembered"


@pytest.mark.full  # within one process: test_troubled_model.py
async def test_it_ends_when_its_model_is_broken_and_its_request_is_for_others(
    kafka_broker: Broker, tmp_path: Path, cache: Path
) -> None:
    environment = {"GREENROOM_FAULT": "worker:device:6", "GREENROOM_WORKER_POLICY": "moe-infinity"}
    async with worker(kafka_broker, tmp_path, cache, **environment) as around:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await around.run("cut", 900)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert await asyncio.to_thread(around.process.wait_end) == 1, around.process.log()
        # They were sent before it ended. They may not have been read here yet.
        await until(lambda: len(around.gateway.got["cut"]) >= 6)
        assert "the device computes nothing any more (AcceleratorError: CUDA error" in around.process.log()
        assert await around.directory.wait_for(lambda known: known.gone(around.member.instance), DEADLINE_S)
