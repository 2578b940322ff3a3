"""A gRPC server with health, reflection, limits, errors as statuses and a bounded end, as every service has it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha import reflection

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.fabric.rpc.errors import Shape, as_status
from greenroom.fabric.rpc.guard import Guard, GuardInterceptor
from greenroom.fabric.rpc.health import HEALTH_SERVICE, Health
from greenroom.fabric.rpc.servicers import register
from greenroom.fabric.rpc.tls import ServerTls

_LOG = logging.getLogger(__name__)
_FLUSH_S = 1.0
_HEARD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``port`` 0 takes a free one. ``max_calls``: calls at once, streams included; more are refused.
    ``max_message_bytes``: of one message, either way. ``keep_alive_s``: after so long of silence on a connection the
    other side is pinged; ``keep_alive_timeout_s``: how long it has to answer. ``min_ping_s``: callers that ping more
    often than this are cut off. Raises InvalidConfig, naming the field."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ServerTls | None = None
    max_calls: int = 4096
    max_message_bytes: int = 64 * MIB
    keep_alive_s: float = 10.0
    keep_alive_timeout_s: float = 5.0
    min_ping_s: float = 4.0
    reflection: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig("port", self.port, "it is a number from 0 (a free one) to 65535")
        for field in ("max_calls", "max_message_bytes"):
            if getattr(self, field) < 1:
                raise InvalidConfig(field, getattr(self, field), "it is a number from 1")
        for field in ("keep_alive_s", "keep_alive_timeout_s", "min_ping_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")

    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", 0),  # else two servers could share a port unnoticed
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keep_alive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keep_alive_timeout_s * 1000)),
            # Of every ping: while one that measures the link is out, for a minute by default, no keep-alive is sent.
            ("grpc.http2.ping_timeout_ms", int(self.keep_alive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", int(self.min_ping_s * 1000)),
        ]


class Server:
    """Serves ``servicers`` on the event loop that ``start`` is called on.

    ``shape``: the status of an error. Health says not serving until ``serving(True)``, and from ``stop`` on.
    """

    def __init__(self, config: ServerConfig, servicers: Sequence[object], *, shape: Shape = as_status) -> None:
        self._config = config
        self._servicers = tuple(servicers)
        self._guard = Guard(max_calls=config.max_calls, shape=shape)
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None

    async def start(self) -> int:
        """Listens. Returns the port. Raises InvalidConfig where the address is taken or a certificate can not be
        read."""
        config = self._config
        exempt = frozenset({HEALTH_SERVICE, reflection.SERVICE_NAME})
        server = grpc.aio.server(interceptors=[GuardInterceptor(self._guard, exempt)], options=config.options())
        services = register(self._servicers, server)
        self._health = Health(services)
        register([self._health], server)
        if config.reflection:
            reflection.enable_server_reflection([*services, HEALTH_SERVICE, reflection.SERVICE_NAME], server)
        address = join_address(config.host, config.port)
        try:
            if config.tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, config.tls.credentials())
        except RuntimeError as error:
            raise InvalidConfig("port", address, "it can not be listened on: in use, or not this machine's") from error
        await server.start()
        self._server = server
        _LOG.info("gRPC at %s%s", join_address(config.host, port), "" if config.tls is None else " (TLS)")
        return port

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return self._guard.calls

    def serving(self, serving: bool, service: str | None = None) -> None:
        """Sets what the health service answers: for one service, or for all and the whole."""
        if self._health is None:
            raise RuntimeError("the server has not been started")
        self._health.set(serving, service)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls and say not serving. Running calls may end within ``grace_s``; then they are ended.

        Whoever watches the health has a moment to turn elsewhere. A call that reached gRPC's core before it shut down,
        and not yet its handler, would be told CANCELLED; until then calls are told UNAVAILABLE.
        """
        if self._server is None or self._health is None:
            return
        self._health.set(False)
        heard = asyncio.create_task(asyncio.sleep(_HEARD_S if self._health.watched else 0.0))
        try:
            await self._guard.drain(grace_s)
            await heard
        finally:
            heard.cancel()
        self._health.close()
        await self._server.stop(_FLUSH_S)


def join_address(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
