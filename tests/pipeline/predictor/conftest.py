"""The predictor on a log in memory, called through the in-process twin of gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.messages import DeadLetter, Trace, decode, encode
from greenroom.fabric.log import Topic
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.fabric.rpc import LocalDialer, LocalServer
from greenroom.predictor import PredictorConfig, PredictorMetrics, PredictorService, PredictorServicer
from greenroom.predictor.kinds.registry import MAKE
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.versions.store import VersionStore
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from tests.pipeline.troubled_log import TroubledLog
from tests.waiting import until

DEADLINE_S = 240.0
"""For what hangs. A machine that does much else beside these tests is slow, and passes them."""
REAL = (
    sys.executable,
    "-c",
    "import os, runpy; os.nice = lambda by: 0; runpy.run_module('greenroom.predictor.kinds.make', run_name='__main__')",
)
"""What makes artifacts in the service, at the priority of the tests: at its own a busy machine would not get to it."""
PARTITIONS = 2
CONFIG = PredictorConfig(publish_every=8, publish_after_s=0.02, retry_s=0.005, max_retry_s=0.02, lag_every_s=0.01)


@dataclass
class Running:
    """One predictor."""

    service: PredictorService
    registry: CollectorRegistry
    task: asyncio.Task[None]
    log: TroubledLog
    server: LocalServer
    stub: predictor_pb2_grpc.PredictorStub

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"greenroom_predictor_{name}", labels)
        assert value is not None, (name, labels)
        return value

    async def forecast(
        self, task_type: str = "", previous: npt.NDArray[Any] | None = None, model: str = "m"
    ) -> tuple[predictor_pb2.ForecastResponse, npt.NDArray[np.float32]]:
        """The answer, and its distribution as an array."""
        answer = await self.stub.Forecast(
            predictor_pb2.ForecastRequest(
                model=model,
                task_type=task_type,
                previous=b"" if previous is None else np.asarray(previous, "<f4").tobytes(),
            ),
            timeout=DEADLINE_S,
        )
        array = np.frombuffer(answer.distribution, "<f4").reshape(answer.layers, answer.experts)
        return answer, array

    async def artifacts(self, model: str = "m", kind: str = "") -> predictor_pb2.ListArtifactsResponse:
        request = predictor_pb2.ListArtifactsRequest(model=model, kind=kind)
        return await self.stub.ListArtifacts(request, timeout=DEADLINE_S)

    async def roll_back(self, version: int, model: str = "m", kind: str = "") -> predictor_pb2.RollBackResponse:
        request = predictor_pb2.RollBackRequest(model=model, version=version, kind=kind)
        return await self.stub.RollBack(request, timeout=DEADLINE_S)

    async def stop(self) -> None:
        self.service.end(1.0)
        await asyncio.wait_for(self.task, DEADLINE_S)
        await self.server.stop(0.0)

    async def kill(self) -> None:
        """As if the process had died: nothing more is committed or kept."""
        self.log.dead = True
        self.task.cancel()
        await asyncio.wait([self.task], timeout=DEADLINE_S)
        assert self.task.done()
        await self.server.kill()


@dataclass
class World:
    """The log, and the predictors that run on it."""

    folder: Path
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    dialer: LocalDialer = field(default_factory=LocalDialer)
    instances: list[Running] = field(default_factory=list)

    @property
    def log(self) -> MemoryLog:
        return MemoryLog(self.broker)

    async def start(
        self,
        *,
        store: VersionStore[Snapshot] | None = None,
        after_publish: Callable[[], None] | None = None,
        make: Sequence[str] = MAKE,
        **changed: Any,
    ) -> Running:
        """Ready to be asked."""
        config = dataclasses.replace(CONFIG, **{"state_dir": self.folder, **changed})
        registry = CollectorRegistry()
        log = TroubledLog(self.broker)
        service = PredictorService(
            config,
            log,
            PredictorMetrics(registry),
            store=store,
            after_publish=after_publish,
            make=make,
        )
        address = f"predictor-{len(self.instances)}:1"
        server = self.dialer.serve(address, [PredictorServicer(service, config.part_bytes)])
        stub = self.dialer.stub(predictor_pb2_grpc.PredictorStub, address)
        task = asyncio.create_task(service.run())
        running = Running(service, registry, task, log, server, stub)
        self.instances.append(running)
        await self.until(lambda: service.unready is None or task.done())
        return running

    async def send(self, *traces: Trace | bytes | None) -> None:
        for one in traces:
            key = one.request_id.encode() if isinstance(one, Trace) else b"?"
            await self.log.append("traces", encode(one) if isinstance(one, Trace) else one, key=key)

    async def committed(self) -> int:
        """Over all partitions."""
        positions = [await self.log.committed("traces", "predictor", number) for number in range(PARTITIONS)]
        return sum(position or 0 for position in positions)

    async def sent(self) -> int:
        return sum([await self.log.offset_at("traces", number, 2**60) for number in range(PARTITIONS)])

    async def letters(self) -> list[DeadLetter]:
        end = await self.log.offset_at("dead-letters", 0, 2**60)
        found: list[DeadLetter] = []
        async with self.log.reader("dead-letters", 0, start=0) as reader, asyncio.timeout(DEADLINE_S):
            while len(found) < end:
                found += [decode(record.value or b"", DeadLetter) for record in await reader.poll(0.1)]
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, within_s=DEADLINE_S)

    async def until_committed(self) -> None:
        """Until all of ``traces`` is."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.committed() != await self.sent():
                if all(instance.task.done() for instance in self.instances):
                    for instance in self.instances:
                        instance.task.result()  # why it ended says more than a wait that is over
                await asyncio.sleep(0.002)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "state")
    await made.log.ensure(
        [
            Topic("traces", PARTITIONS),
            Topic("dead-letters", 1, max_message_bytes=50_000),
            Topic("members", compacted=True),
        ]
    )
    async with made.log:
        yield made
        for instance in made.instances:
            instance.task.cancel()
        await asyncio.gather(*(instance.task for instance in made.instances), return_exceptions=True)
        await made.dialer.close()
