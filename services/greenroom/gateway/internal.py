"""Where workers send tokens: the gateway's gRPC server for the other services."""

from __future__ import annotations

from collections.abc import Callable

from greenroom.fabric.lifecycle import Part
from greenroom.fabric.rpc import Server, ServerConfig
from greenroom.gateway.pipeline import Pipeline

_GRACE_S = 1.0


class TokensFront(Part):
    """Listens for workers. To be started before the pipeline, which says where that is.

    ``advertise``: the address under which others reach the port that is listened on.
    """

    def __init__(self, config: ServerConfig, pipeline: Pipeline, advertise: Callable[[int], str]) -> None:
        super().__init__("tokens")
        self._server = Server(config, [pipeline.tokens])
        self._pipeline = pipeline
        self._advertise = advertise

    async def start(self) -> None:
        self._pipeline.address = self._advertise(await self._server.start())
        self._server.serving(True)

    async def stop(self) -> None:
        await self._server.stop(_GRACE_S)
        await super().stop()
