"""Where stubs come from: over the network, or (``local``) within the process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.fabric.rpc.tls import DialerTls

S = TypeVar("S")
StubKind = Callable[[grpc.aio.Channel], S]
"""A generated stub class."""


class Dialer(Protocol):
    """Makes stubs by address. Every dialer passes ``tests/contract/rpc``."""

    def stub(self, kind: StubKind[S], address: str) -> S:
        """A stub of the services at ``address`` (host:port). It connects with its first call. A call to an address
        where nothing answers ends with UNAVAILABLE."""
        ...

    async def forget(self, address: str) -> None:
        """The server at the address is gone: running calls to it are cancelled."""
        ...

    async def close(self) -> None:
        """Cancels all calls."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DialerConfig:
    """``max_message_bytes``: of one message, either way. ``keep_alive_s``: after so long of silence on a connection
    that has calls the other side is pinged; ``keep_alive_timeout_s``: how long it has to answer. ``connect_timeout_s``:
    of one attempt to connect; ``max_back_off_s``: the longest pause between attempts. Raises InvalidConfig."""

    tls: DialerTls | None = None
    max_message_bytes: int = 64 * MIB
    keep_alive_s: float = 10.0
    keep_alive_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    max_back_off_s: float = 2.0

    def __post_init__(self) -> None:
        if self.max_message_bytes < 1:
            raise InvalidConfig("max_message_bytes", self.max_message_bytes, "it is a number from 1")
        for field in ("keep_alive_s", "keep_alive_timeout_s", "connect_timeout_s", "max_back_off_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")

    def options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [
            ("grpc.enable_http_proxy", 0),  # services call each other directly: a proxy is for the web
            ("grpc.enable_retries", 0),  # the caller retries, within its budget
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keep_alive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keep_alive_timeout_s * 1000)),
            # Of every ping: while one that measures the link is out, for a minute by default, no keep-alive is sent.
            ("grpc.http2.ping_timeout_ms", int(self.keep_alive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", int(self.connect_timeout_s * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(self.max_back_off_s * 1000)),
        ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


class GrpcDialer:
    """Keeps one channel an address until it is forgotten."""

    def __init__(self, config: DialerConfig | None = None) -> None:
        self._config = config or DialerConfig()
        self._credentials = self._config.tls.credentials() if self._config.tls is not None else None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def stub(self, kind: StubKind[S], address: str) -> S:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect(address)
        return kind(channel)

    def _connect(self, address: str) -> grpc.aio.Channel:
        options = self._config.options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._credentials, options)

    async def forget(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
