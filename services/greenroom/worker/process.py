"""A worker's service as a process: what it listens on, and how others learn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.fabric.lifecycle import Entered, Part, Service
from greenroom.fabric.log import Log
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.rpc import GrpcDialer, Server, ServerConfig
from greenroom.worker.service import WorkerService
from greenroom.worker.servicer import WorkerServicer

_GRACE_S = 2.0


class Listening(Part):
    """The gRPC server. ``address``: of the port that it listens on, how others reach it."""

    def __init__(self, service: WorkerService, config: ServerConfig, address: Callable[[int], str]) -> None:
        super().__init__("server")
        self._service = service
        self._server = Server(config, [WorkerServicer(service)])
        self._address = address

    async def start(self) -> None:
        self._service.address = self._address(await self._server.start())

    def serving(self, serving: bool) -> None:
        self._server.serving(serving)

    async def drain(self, timeout_s: float) -> None:
        self.serving(False)

    async def stop(self) -> None:
        await self._server.stop(_GRACE_S)
        await super().stop()


class Announced(Part):
    """Says that the worker is here; the last to start and the first to stop."""

    def __init__(self, service: WorkerService, log: Log, listening: Listening) -> None:
        super().__init__("announcer")
        self._announcer = Announcer(log, service.member)
        self._listening = listening
        service.changed = self._announcer.changed

    async def start(self) -> None:
        await self._announcer.start()
        self._listening.serving(True)

    async def stop(self) -> None:
        await self._announcer.stop()
        await super().stop()


def worker_parts(
    service: WorkerService,
    log: Log,
    dialer: GrpcDialer,
    directory: Directory,
    config: ServerConfig,
    address: Callable[[int], str],
) -> Sequence[Service]:
    """A process's parts in the order of their start; ``log`` has been entered, the others are here.

    What ends is drained first, so its runs have been given back, and answered, before it says that it has left.
    """
    listening = Listening(service, config, address)
    return [
        Entered("dialer", dialer),
        Entered("directory", directory),
        listening,
        service,
        Announced(service, log, listening),
    ]
