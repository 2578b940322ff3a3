"""A small HTTP port for services that have no other: /live, /health and /metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from greenroom.core.errors import InvalidConfig

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbesConfig:
    """``port`` 0 takes a free one. Raises InvalidConfig, naming the field."""

    host: str = "127.0.0.1"
    port: int = 0
    idle_connection_s: float = 75.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig("port", self.port, "it is a number from 0 (a free one) to 65535")
        if not 0 < self.idle_connection_s < math.inf:
            raise InvalidConfig("idle_connection_s", self.idle_connection_s, "it is a number of seconds above 0")


class Probes:
    """/live, /health and /metrics. ``unready`` says why /health is 503; None: it is 200.

    It is up before the service's parts start and until they have stopped, so it is not one of them.
    """

    def __init__(self, config: ProbesConfig, registry: CollectorRegistry, unready: Callable[[], str | None]) -> None:
        self._config = config
        self._registry = registry
        self._unready = unready
        app = web.Application()
        app.router.add_get("/live", self._live)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=config.idle_connection_s, shutdown_timeout=1.0
        )

    async def start(self) -> int:
        """Listens; the port. Raises InvalidConfig where the address can not be had."""
        config = self._config
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port).start()
        except OSError as error:
            await self._runner.cleanup()
            reason = f"it can not be listened on: {error.strerror or error}"
            raise InvalidConfig("probes_port", f"{config.host}:{config.port}", reason) from error
        port = int(self._runner.addresses[0][1])
        _LOG.info("/live, /health and /metrics at http://%s:%d", config.host, port)
        return port

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _live(self, request: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def _health(self, request: web.Request) -> web.Response:
        why = self._unready()
        if why is None:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": why}, status=503)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
