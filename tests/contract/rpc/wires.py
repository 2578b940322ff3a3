"""The two ways that calls go: over a socket, and within the process."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc

from greenroom.fabric.rpc import Dialer, GrpcDialer, LocalDialer, LocalServer, Server, ServerConfig
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer, EchoStub

DEADLINE_S = 10.0


class Wire(ABC):
    """One server with an Echo service, and a dialer that reaches it."""

    dialer: Dialer
    address: str
    _server: Server | LocalServer | None = None

    @abstractmethod
    async def serve(self, servicer: EchoServicer, **limits: Any) -> None: ...

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    @property
    def calls(self) -> int:
        return self._server.calls if self._server is not None else 0

    def stub(self) -> EchoStub:
        return self.dialer.stub(EchoStub, self.address)


class Network(Wire):
    def __init__(self) -> None:
        self.dialer = GrpcDialer()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"

    async def serve(self, servicer: EchoServicer, **limits: Any) -> None:
        self._server = server = Server(ServerConfig(port=self._port, **limits), [servicer])
        assert await server.start() == self._port
        server.serving(True)


class Local(Wire):
    def __init__(self) -> None:
        self.dialer = self._local = LocalDialer()
        self.address = "worker-1"

    async def serve(self, servicer: EchoServicer, **limits: Any) -> None:
        self._server = self._local.serve(self.address, [servicer], **limits)


WIRES: dict[str, Callable[[], Wire]] = {"network": Network, "local": Local}


async def settled(figure: Callable[[], int]) -> int:
    """``figure`` once it has not changed for a while."""
    async with asyncio.timeout(DEADLINE_S):
        last, same = figure(), 0
        while same < 20:
            await asyncio.sleep(0.01)
            now = figure()
            same = same + 1 if now == last else 0
            last = now
    return last


async def drained(call: Any) -> tuple[list[Echo], grpc.aio.AioRpcError]:
    """All responses of a stream that fails, and how it fails."""
    got = []
    try:
        async for echo in call:
            got.append(echo)
    except grpc.aio.AioRpcError as failure:
        return got, failure
    raise AssertionError(f"it did not fail after {len(got)} responses")
