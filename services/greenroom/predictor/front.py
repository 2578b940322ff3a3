"""Where the predictor is called, and how the others learn where that is."""

from __future__ import annotations

from collections.abc import Callable

from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.lifecycle import Part
from greenroom.fabric.log import Log
from greenroom.fabric.members import Announcer
from greenroom.fabric.rpc import Server

TTL_MS = 15_000


class Front(Part):
    """Serves calls and says so on ``members``. To be started after the service that answers, and stopped before it.

    ``advertise``: the address under which others reach the port that is listened on.
    """

    def __init__(self, server: Server, log: Log, instance: str, advertise: Callable[[int], str]) -> None:
        super().__init__("calls")
        self._server = server
        self._instance = instance
        self._advertise = advertise
        self._address = ""
        self._draining = False
        self._announcer = Announcer(log, self._say)

    @property
    def address(self) -> str:
        """Under which others reach it, once it has been started."""
        return self._address

    async def start(self) -> None:
        self._address = self._advertise(await self._server.start())
        self._server.serving(True)
        try:
            await self._announcer.start()
        except BaseException:
            await self._server.stop(0.0)
            raise

    def _say(self) -> Member:
        return Member(
            member=MemberKind.PREDICTOR,
            instance=self._instance,
            address=self._address,
            ttl_ms=TTL_MS,
            draining=self._draining,
        )

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        self._server.serving(False)
        self._announcer.changed()

    async def stop(self) -> None:
        await self._announcer.stop()
        await self._server.stop(1.0)
        await super().stop()
