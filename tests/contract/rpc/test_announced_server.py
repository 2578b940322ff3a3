"""ServedEndpoint and AnnouncedServer at every endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.announced_server import AnnouncedServer, ServedEndpoint
from greenroom.fabric.lifecycle import Life, Part
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import (
    Context,
    Dialer,
    Endpoint,
    GrpcDialer,
    LocalDialer,
    LocalEndpoint,
    NetworkEndpoint,
    ServerConfig,
)
from greenroom.fabric.topics import Topics, all_topics
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer, EchoStub
from tests.contract.rpc.wires import DEADLINE_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Slow(EchoServicer):
    """Answers once it is let."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def Unary(self, request: Echo, context: Context) -> Echo:
        self.asked.set()
        await self.go_on.wait()
        return request


class Owner:
    address = ""


class Behind(Part):
    """What answers the calls; started behind the endpoint. Ending, it answers what waits."""

    def __init__(self, slow: Slow, owner: Owner) -> None:
        super().__init__("behind")
        self.slow = slow
        self.owner = owner
        self.address_at_start = ""

    async def start(self) -> None:
        self.address_at_start = self.owner.address

    async def stop(self) -> None:
        self.slow.go_on.set()


@dataclass
class Stage:
    """A log, and an endpoint with the dialer that reaches it."""

    log: MemoryLog
    dialer: Dialer
    endpoint: Endpoint
    here: Member

    async def announced(self, *, servicer: EchoServicer | None = None) -> tuple[ServedEndpoint, AnnouncedServer]:
        """Both started."""
        served = ServedEndpoint("calls", self.endpoint, [servicer or EchoServicer()])
        announced = AnnouncedServer(self.log, served, lambda: self.here)
        await served.start()
        await announced.start()
        return served, announced

    async def echo(self, address: str) -> bytes:
        answer = await self.dialer.stub(EchoStub, address).Unary(Echo(value=b"hello"), timeout=DEADLINE_S)
        return answer.value


@pytest.fixture(params=["network", "local"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    log = MemoryLog(MemoryBroker())
    await log.ensure(all_topics(Topics()))
    local = LocalDialer()
    dialer: Dialer = local
    endpoint: Endpoint = LocalEndpoint(local, "worker-1")
    if request.param == "network":
        dialer = GrpcDialer()
        endpoint = NetworkEndpoint(ServerConfig(), lambda port: f"127.0.0.1:{port}")
    here = Member(member=MemberKind.WORKER, instance="w.1", address="", ttl_ms=60_000)
    async with log:
        yield Stage(log, dialer, endpoint, here)
    await dialer.close()


async def test_a_member_can_be_called_at_its_address(stage: Stage) -> None:
    served, announced = await stage.announced()
    async with Directory(stage.log) as directory:
        (member,) = directory.of(MemberKind.WORKER)
        assert (member.instance, member.address, member.draining) == ("w.1", served.address, False)
        assert await stage.echo(member.address) == b"hello"
    await announced.stop()
    await served.stop()


async def test_what_drains_says_so_and_still_takes_calls(stage: Stage) -> None:
    served, announced = await stage.announced()
    async with Directory(stage.log) as directory:
        await announced.drain(1.0)
        await served.drain(1.0)
        assert await directory.wait_for(_drains, DEADLINE_S)
        assert await stage.echo(served.address) == b"hello"
    await announced.stop()
    await served.stop()


async def test_changes_are_said_and_so_is_what_drains_by_itself(stage: Stage) -> None:
    served, announced = await stage.announced()
    async with Directory(stage.log) as directory:
        stage.here = Member(
            member=MemberKind.WORKER, instance="w.1", address="elsewhere:1", ttl_ms=60_000, pool=3, draining=True
        )
        announced.changed()
        assert await directory.wait_for(lambda known: bool(known.of(MemberKind.WORKER, pool=3)), DEADLINE_S)
        (member,) = directory.of(MemberKind.WORKER)
        assert (member.address, member.draining) == (served.address, True)
    await announced.stop()
    await served.stop()


async def test_a_member_that_has_left_is_called_no_more_and_what_runs_may_end(stage: Stage) -> None:
    slow = Slow()
    served, announced = await stage.announced(servicer=slow)
    async with Directory(stage.log) as directory:
        running = asyncio.ensure_future(stage.echo(served.address))
        await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
        await announced.stop()
        assert await directory.wait_for(lambda known: known.gone("w.1"), DEADLINE_S)
        stopping = asyncio.create_task(served.stop())
        slow.go_on.set()
        assert await asyncio.wait_for(running, DEADLINE_S) == b"hello"
        await asyncio.wait_for(stopping, DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stage.echo(served.address)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_grace_is_a_bound(stage: Stage) -> None:
    slow = Slow()
    served = ServedEndpoint("calls", stage.endpoint, [slow], grace_s=0.05)
    await served.start()
    running = asyncio.ensure_future(stage.echo(served.address))
    await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
    await asyncio.wait_for(served.stop(), DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(running, DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_life_with_what_answers_in_between(stage: Stage) -> None:
    """Its owner knows the address when it starts, and answers what waits when it stops."""
    slow, owner = Slow(), Owner()
    served = ServedEndpoint("calls", stage.endpoint, [slow], owner=owner, grace_s=DEADLINE_S)
    behind = Behind(slow, owner)
    life = Life([served, behind, AnnouncedServer(stage.log, served, lambda: stage.here)])
    living = asyncio.create_task(life.run())
    async with Directory(stage.log) as directory:
        assert await directory.wait_for(lambda known: known.get("w.1") is not None, DEADLINE_S)
        assert behind.address_at_start == owner.address == served.address
        waiting = asyncio.ensure_future(stage.echo(served.address))
        await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
        life.stop()
        assert await asyncio.wait_for(waiting, DEADLINE_S) == b"hello"
        assert await asyncio.wait_for(living, DEADLINE_S) == 0
        assert directory.gone("w.1") or await directory.wait_for(lambda known: known.gone("w.1"), DEADLINE_S)


async def test_where_it_can_not_be_said_nothing_is_served(stage: Stage) -> None:
    served = ServedEndpoint("calls", stage.endpoint, [EchoServicer()])
    life = Life([served, AnnouncedServer(stage.log, served, _nobody)])
    assert await asyncio.wait_for(life.run(), DEADLINE_S) == 1
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stage.echo(served.address)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_address_that_is_taken_is_refused(stage: Stage) -> None:
    served, announced = await stage.announced()
    if isinstance(stage.dialer, LocalDialer):
        second: Endpoint = LocalEndpoint(stage.dialer, served.address)
    else:
        port = int(served.address.rpartition(":")[2])
        second = NetworkEndpoint(ServerConfig(port=port), lambda number: f"127.0.0.1:{number}")
    with pytest.raises((InvalidConfig, ValueError)):
        await ServedEndpoint("calls", second, [EchoServicer()]).start()
    await announced.stop()
    await served.stop()


async def test_health_says_whether_it_drains() -> None:
    served = ServedEndpoint(
        "calls", NetworkEndpoint(ServerConfig(), lambda port: f"127.0.0.1:{port}"), [EchoServicer()]
    )
    await served.start()
    async with GrpcDialer() as dialer:
        health: Any = dialer.stub(health_pb2_grpc.HealthStub, served.address)
        asked = health_pb2.HealthCheckRequest(service="tests.Echo")
        assert (await health.Check(asked, timeout=DEADLINE_S)).status == SERVING
        await served.drain(1.0)
        assert (await health.Check(asked, timeout=DEADLINE_S)).status == NOT_SERVING
    await served.stop()


def _drains(known: Directory) -> bool:
    member = known.get("w.1")
    return member is not None and member.draining


def _nobody() -> Member:
    raise RuntimeError("which members are here is unknown")
