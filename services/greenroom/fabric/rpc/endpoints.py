"""Endpoints, where services are called: a port, or a name within the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.fabric.rpc.local.dialer import LocalDialer, LocalServer
from greenroom.fabric.rpc.server import Server, ServerConfig


class Endpoint(Protocol):
    """Listens once and stops once. Every endpoint passes ``tests/contract/rpc``."""

    async def listen(self, servicers: Sequence[object]) -> str:
        """Take calls of ``servicers`` from now on. Returns their address. Raises where that is not possible."""
        ...

    def serving(self, serving: bool) -> None:
        """What the health service answers from now on, where there is one."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new calls. Running ones may end within ``grace_s``; then they are ended."""
        ...


class NetworkEndpoint:
    """A port, as ``config`` has it. ``advertise``: from the port listened on, the address at which others reach it."""

    def __init__(self, config: ServerConfig, advertise: Callable[[int], str]) -> None:
        self._config = config
        self._advertise = advertise
        self._server: Server | None = None

    async def listen(self, servicers: Sequence[object]) -> str:
        """Raises InvalidConfig where the port is taken or a certificate can not be read."""
        server = Server(self._config, servicers)
        port = await server.start()
        self._server = server
        return self._advertise(port)

    def serving(self, serving: bool) -> None:
        if self._server is not None:
            self._server.serving(serving)

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)


class LocalEndpoint:
    """``address``, for callers that use ``dialer``. There is no health service, since it would have no callers."""

    def __init__(self, dialer: LocalDialer, address: str) -> None:
        self._dialer = dialer
        self._address = address
        self._server: LocalServer | None = None

    async def listen(self, servicers: Sequence[object]) -> str:
        """Raises ValueError where the address is served already."""
        self._server = self._dialer.serve(self._address, servicers)
        return self._address

    def serving(self, serving: bool) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
