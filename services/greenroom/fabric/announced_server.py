"""A service that others call: where it is called, and that it says so among the members."""

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
    """Who says by itself where it is called."""

    address: str


class Served(Part):
    """``servicers`` at ``endpoint``, from its start to its stop; ``address``: where that is, once started.

    Calls are taken while it drains too, so what answers them may drain before it or after it; it is to be started
    before what stops only while it can still answer. ``owner``: is told the address. ``grace_s``: how long calls that
    are under way may take to end when it stops.
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


class Announced(Part):
    """Says on ``members`` what ``say`` returns, with the address of ``served`` and, once it drains, that it does.

    To be started last and so stopped first: who is here can be called, and who can not be called has left.
    """

    def __init__(self, log: Log, served: Served, say: Callable[[], Member]) -> None:
        super().__init__(f"announcer of {served.name}")
        self._served = served
        self._say = say
        self._draining = False
        self._announcer = Announcer(log, self._member)

    def changed(self) -> None:
        """What ``say`` returns may be different now."""
        self._announcer.changed()

    async def start(self) -> None:
        """Returns when it has been said. Raises LogUnavailable where that takes too long."""
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
