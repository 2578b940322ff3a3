"""The gateway's parts of a process."""

from __future__ import annotations

from greenroom.fabric.announced_server import ServedEndpoint
from greenroom.fabric.lifecycle.service import Part
from greenroom.fabric.rpc import Endpoint
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.gateway.server import Gateway


def tokens_endpoint(pipeline: Pipeline, endpoint: Endpoint) -> ServedEndpoint:
    """Where workers deliver their tokens. To be started before ``pipeline``, and so stopped after it.

    Then no request is under way. Calls end at once when it stops, since a worker's stream does not end by itself.
    """
    return ServedEndpoint("tokens", endpoint, [pipeline.tokens], owner=pipeline, grace_s=0.0)


class GatewayService(Part):
    """Starts and stops ``gateway`` with the other parts of the process. ``port``: of HTTP, once started."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__("gateway")
        self._gateway = gateway
        self.port = 0

    @property
    def unready(self) -> str | None:
        return self._gateway.unready

    async def start(self) -> None:
        self.port = await self._gateway.start()

    async def drain(self, timeout_s: float) -> None:
        await self._gateway.drain(timeout_s)

    async def stop(self) -> None:
        await self._gateway.stop()
        await super().stop()

    async def failed(self) -> BaseException:
        return await self._gateway.tasks.failed()
