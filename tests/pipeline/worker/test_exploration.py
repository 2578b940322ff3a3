"""A service, its gateways and its scheduler have random trouble. In the end every client has the whole of its text."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from greenroom.core.messages import Task
from greenroom.v1 import worker_pb2
from greenroom.worker.service_config import StreamConfig
from tests.pipeline.worker.scripted import Gateway, Lease, Stage, answer, staged, until
from tests.waiting import DEADLINE_S

LENGTH = 30
REQUESTS = 5
ROUNDS = 40
TROUBLES = ["step", "step", "step", "kill", "serve", "slow", "quick", "hang up", "lapse", "lease"]


class Caller:
    """A scheduler's call for one request, made again under the next attempt whenever it breaks."""

    def __init__(self, stage: Stage, task: Task) -> None:
        self.stage = stage
        self.task = task
        self.result: tuple[int, ...] | None = None
        self.call: Any = None
        self._n = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self.result is None:
            self._n += 1
            self.call = self.stage.run(self.task, self._n)
            try:
                response: worker_pb2.RunResponse = await self.call
            except grpc.aio.AioRpcError:
                continue
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                continue  # the call was hung up, not this task
            assert response.WhichOneof("end") == "result", response
            self.result = tuple(response.result.token_ids)

    def hang_up(self) -> None:
        if self.call is not None:
            self.call.cancel()

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._task


class Trouble:
    """One thing after another; all of it can be put right."""

    def __init__(self, stage: Stage, chance: random.Random, gateways: list[Gateway], callers: list[Caller]) -> None:
        self.stage = stage
        self.chance = chance
        self.gateways = gateways
        self.callers = callers
        self.dead: set[str] = set()
        self.lease: Lease | None = None

    async def one(self) -> None:
        gateway = self.chance.choice(self.gateways)
        match self.chance.choice(
            ["step", "step", "step", "kill", "serve", "slow", "quick", "hang up", "lapse", "lease"]
        ):
            case "step":
                await self.stage.step(self.chance.randint(1, 3))
            case "kill" if gateway.instance not in self.dead:
                self.dead.add(gateway.instance)
                await gateway.kill()
            case "serve":
                await self._serve(gateway)
            case "slow":
                gateway.reading.clear()
            case "quick":
                gateway.reading.set()
            case "hang up":
                self.chance.choice(self.callers).hang_up()
            case "lapse" if self.lease is not None:
                await self.lease.hang_up()
                self.lease = None
                self.stage.clock.pass_(10_000)
            case "lease" if self.lease is None:
                self.lease = await self.stage.lease(5_000)
        self.stage.service.table.audit()
        for _ in range(self.chance.randint(0, 20)):
            await asyncio.sleep(0)

    async def _serve(self, gateway: Gateway) -> None:
        if gateway.instance in self.dead:
            self.dead.discard(gateway.instance)
            await gateway.serve()

    async def over(self) -> None:
        for gateway in self.gateways:
            gateway.reading.set()
            await self._serve(gateway)
        if self.lease is None:
            self.lease = await self.stage.lease()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 300))])
async def test_every_text_is_whole_and_the_clients(seed: int, net: str) -> None:
    chance = random.Random(seed)
    streams = StreamConfig(slow_gateway_ms=1_000_000, most_pending=1_000)
    async with staged(max_running=16, streams=streams, grace_ms=3_000_000) as stage:
        gateways = [await stage.gateway(f"gateway{number}") for number in range(2)]
        owners: dict[str, Gateway] = {}
        callers = []
        for number in range(REQUESTS):
            owner = owners[f"r{number}"] = chance.choice(gateways)
            owner.expect(f"r{number}", *answer((number,), chance.choice([0, 0, 7])))
            task = stage.task(f"r{number}", reply_to=owner.instance, prompt=(number,), length=LENGTH)
            callers.append(Caller(stage, task))
        trouble = Trouble(stage, chance, gateways, callers)
        for _ in range(ROUNDS):
            await trouble.one()
        await trouble.over()
        ending = asyncio.gather(*(caller.end() for caller in callers))
        while not ending.done():
            await stage.step()
            await asyncio.sleep(0.001)
        await ending
        for number, caller in enumerate(callers):
            whole = answer((number,), LENGTH)
            got = owners[f"r{number}"].got[f"r{number}"]
            assert caller.result == whole
            await until(lambda got=got, whole=whole: tuple(got) == whole)  # type: ignore[misc]
