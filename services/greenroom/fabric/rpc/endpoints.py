"""Where services are called: at a port, or under a name within the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.fabric.rpc.local import LocalDialer, LocalServer
from greenroom.fabric.rpc.server import Server, ServerConfig


class Endpoint(Protocol):
    """One place, for one life. ``tests/contract/rpc`` holds for every endpoint."""

    async def listen(self, servicers: Sequence[object]) -> str:
        """Calls of ``servicers`` are taken from now on; the address that reaches them. Raises what keeps them out."""
        ...

    def serving(self, serving: bool) -> None:
        """What the health service answers from now on, where there is one."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Nothing new from now on; calls may end within ``grace_s``, then they are ended."""
        ...


class NetworkEndpoint:
    """A port, as ``config`` has it. ``advertise``: the address under which others reach the port listened on."""

    def __init__(self, config: ServerConfig, advertise: Callable[[int], str]) -> None:
        self._config = config
        self._advertise = advertise
        self._server: Server | None = None

    async def listen(self, servicers: Sequence[object]) -> str:
        """Raises InvalidConfig where the port can not be had or a certificate not be read."""
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
    """``address`` for whoever calls by way of ``dialer``. There is no health service: nobody asks for it."""

    def __init__(self, dialer: LocalDialer, address: str) -> None:
        self._dialer = dialer
        self._address = address
        self._server: LocalServer | None = None

    async def listen(self, servicers: Sequence[object]) -> str:
        """Raises ValueError where another is there."""
        self._server = self._dialer.serve(self._address, servicers)
        return self._address

    def serving(self, serving: bool) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
