"""A service that others call: a server at an endpoint, and its announcement among the members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from greenroom.core.messages import Member
from greenroom.fabric.lifecycle import Part
from greenroom.fabric.log import Log
from greenroom.fabric.members import Announcer
from greenroom.fabric.rpc.endpoints import Endpoint


class Addressed(Protocol):
    """A service that tells others its address by itself."""

    address: str


class ServedEndpoint(Part):
    """``servicers`` at ``endpoint``, from its start to its stop. ``address``: where that is, once started.

    Calls are taken while it drains too, so the service behind it may drain before it or after it. A service that
    answers calls while it stops is to be started after this, so that it stops first. ``owner``: is told the address.
    ``grace_s``: how long running calls may take to end when it stops.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        servicers: Sequence[object],
        *,
        owner: Addressed | None = None,
        grace_s: float = 1.0,
    ) -> None:
        super().__init__(name)
        self.address = ""
        self._endpoint = endpoint
        self._servicers = servicers
        self._owner = owner
        self._grace_s = grace_s

    async def start(self) -> None:
        self.address = await self._endpoint.listen(self._servicers)
        if self._owner is not None:
            self._owner.address = self.address
        self._endpoint.serving(True)

    async def drain(self, timeout_s: float) -> None:
        self._endpoint.serving(False)

    async def stop(self) -> None:
        await self._endpoint.stop(self._grace_s)
        await super().stop()


class AnnouncedServer(Part):
    """Announces on ``members`` what ``say`` returns, with the address of ``served`` and whether it drains.

    To be started last, and so stopped first: every announced instance can be called.
    """

    def __init__(self, log: Log, served: ServedEndpoint, say: Callable[[], Member]) -> None:
        super().__init__(f"announcer of {served.name}")
        self._served = served
        self._say = say
        self._draining = False
        self._announcer = Announcer(log, self._member)

    def changed(self) -> None:
        """``say`` may return something else now."""
        self._announcer.changed()

    async def start(self) -> None:
        """Returns when it is announced. Raises LogUnavailable where that takes too long."""
        await self._announcer.start()

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        self.changed()

    async def stop(self) -> None:
        await self._announcer.stop()
        await super().stop()

    def _member(self) -> Member:
        said = self._say()
        return msgspec.structs.replace(said, address=self._served.address, draining=said.draining or self._draining)
