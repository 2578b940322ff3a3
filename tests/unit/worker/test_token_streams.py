"""What carries tokens to a gateway lives as long as the gateway, not as long as the request whose tokens came first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.current_request import request_id, working_on
from greenroom.fabric.rpc import Context, LocalDialer
from greenroom.fabric.wire import to_token_run
from greenroom.v1 import tokens_pb2, tokens_pb2_grpc
from greenroom.worker.gateways.stream_edges import StreamEdges
from greenroom.worker.gateways.token_streams import TokenStreams
from greenroom.worker.service_config import StreamConfig
from greenroom.worker.service_counters import ServiceCounters
from tests.hand_clock import HandClock
from tests.waiting import until


class NoMembers:
    """Members of which every one has gone. ``asked_for``: which request was worked on whenever it was asked."""

    def __init__(self) -> None:
        self.asked_for: list[str] = []

    def get(self, instance: str) -> Member | None:
        self.asked_for.append(request_id.get())
        return None

    def gone(self, instance: str) -> bool:
        return True


class Listener:
    def __init__(self) -> None:
        self.without_gateway: list[str] = []
        self.opened: list[str] = []

    def stream_opened(self, request_id: str, attempt: Attempt, delivered: Sequence[Token]) -> None:
        self.opened.append(request_id)

    def stream_unwanted(self, request_id: str, attempt: Attempt) -> None:
        raise NotImplementedError

    def stream_broken(self, request_id: str, attempt: Attempt) -> None:
        raise NotImplementedError

    def no_stream(self, request_id: str, attempt: Attempt) -> None:
        self.without_gateway.append(request_id)

    def may_emit(self) -> bool:
        return True


async def test_a_connection_works_on_no_request_in_particular() -> None:
    members, listener = NoMembers(), Listener()
    async with LocalDialer() as dialer:
        edges = StreamEdges(dialer, members, listener, StreamConfig(), ServiceCounters(), lambda: 0.0)
        streams = TokenStreams(edges)
        with working_on("r-1"):
            streams.open("r-1", Attempt(1, 0), "g-1")
        await until(lambda: listener.without_gateway == ["r-1"], "its gateway is not there")
        await streams.stop(1.0)
    assert members.asked_for
    assert set(members.asked_for) == {""}


class Here:
    """Members of which every one is here."""

    def get(self, instance: str) -> Member | None:
        return Member(member=MemberKind.GATEWAY, instance=instance, address=instance, ttl_ms=6_000)

    def gone(self, instance: str) -> bool:
        return False


class Endless(tokens_pb2_grpc.TokensServicer):
    """Never ends a call. ``begun``, ``over``: how many calls it has had, and how many of them were cancelled."""

    def __init__(self) -> None:
        self.begun = self.over = 0

    async def Deliver(
        self, request_iterator: AsyncIterator[tokens_pb2.FromWorker], context: Context
    ) -> AsyncIterator[tokens_pb2.FromGateway]:
        self.begun += 1
        try:
            async for message in request_iterator:
                for opening in message.open:
                    delivered = tokens_pb2.StreamReply(stream=opening.stream, delivered=to_token_run(()))
                    yield tokens_pb2.FromGateway(replies=[delivered])
            await asyncio.Event().wait()
        finally:
            self.over += 1


async def two_idle_calls(streams: TokenStreams, listener: Listener, clock: HandClock, idle_ms: float) -> None:
    """One after the other to the gateway ``g``, each left without a stream for longer than ``idle_ms``."""
    for number in range(2):
        name, attempt = f"r-{number}", Attempt(1, number)
        streams.open(name, attempt, "g")
        await until(lambda: name in listener.opened, "the gateway has the stream")  # noqa: B023
        streams.close(name, attempt)
        streams.tick()
        clock.now += idle_ms + 1
        streams.tick()


async def test_a_gateway_that_never_ends_an_idle_call_loses_it(caplog: pytest.LogCaptureFixture) -> None:
    clock, listener, gateway, counters = HandClock(), Listener(), Endless(), ServiceCounters()
    config = StreamConfig(idle_gateway_ms=1_000, slow_gateway_ms=500)
    async with LocalDialer() as dialer:
        dialer.serve("g", [gateway])
        streams = TokenStreams(StreamEdges(dialer, Here(), listener, config, counters, clock))
        await two_idle_calls(streams, listener, clock, 1_000)
        assert (streams.gateways, streams.ending) == (0, 2), "the second one was opened beside the first"
        clock.now += 501
        for _ in range(3):
            streams.tick()
        await until(lambda: gateway.over == 2, "both calls are given up")
        await until(lambda: streams.ending == 0, "none is left")
        assert counters.gateways_dropped == 2, "each is counted once"
        assert (
            caplog.messages
            == ["gateway g is too slow, its call is dropped: it did not end its idle call for 0.5 s"] * 2
        )
        streams.tick()
        await streams.stop(1.0)


async def test_the_end_waits_for_calls_that_others_have_replaced() -> None:
    clock, listener, gateway = HandClock(), Listener(), Endless()
    async with LocalDialer() as dialer:
        dialer.serve("g", [gateway])
        edges = StreamEdges(dialer, Here(), listener, StreamConfig(), ServiceCounters(), clock)
        streams = TokenStreams(edges)
        await two_idle_calls(streams, listener, clock, 60_000)
        await streams.stop(0.01)
        assert gateway.begun == 2
        await until(lambda: gateway.over == 2, "both calls have ended")
        assert streams.ending == 0
