"""What carries tokens to a gateway goes on for as long as the gateway does, whoever's tokens were the first."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.core.messages import Member
from greenroom.fabric.current_request import request_id, working_on
from greenroom.fabric.rpc import LocalDialer
from greenroom.worker.gateways.gateway_connection import StreamEdges
from greenroom.worker.gateways.token_streams import TokenStreams
from greenroom.worker.service_config import StreamConfig
from greenroom.worker.service_counters import ServiceCounters
from tests.waiting import until


class Nobody:
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

    def stream_opened(self, request_id: str, attempt: Attempt, delivered: Sequence[Token]) -> None:
        raise NotImplementedError

    def stream_unwanted(self, request_id: str, attempt: Attempt) -> None:
        raise NotImplementedError

    def stream_broken(self, request_id: str, attempt: Attempt) -> None:
        raise NotImplementedError

    def no_stream(self, request_id: str, attempt: Attempt) -> None:
        self.without_gateway.append(request_id)

    def may_emit(self) -> bool:
        return True


async def test_a_connection_works_on_no_request_in_particular() -> None:
    members, listener = Nobody(), Listener()
    async with LocalDialer() as dialer:
        edges = StreamEdges(dialer, members, listener, StreamConfig(), ServiceCounters(), lambda: 0.0)
        streams = TokenStreams(edges)
        with working_on("r-1"):
            streams.open("r-1", Attempt(1, 0), "g-1")
        await until(lambda: listener.without_gateway == ["r-1"], "its gateway is not there")
        await streams.stop(1.0)
    assert members.asked_for
    assert set(members.asked_for) == {""}
