"""How a client is set up: addresses, key, TLS, patience."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from greenroom.core.errors import InvalidConfig

_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """``ca``: PEM file of who signs the gateways' certificates; None: whom this machine trusts. ``certificate`` and
    ``key``: our own, where gateways ask for one. ``server_name``: the name in their certificates, where that is not
    their address."""

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidConfig where a file can not be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca", self.ca),
            private_key=_read("key", self.key),
            certificate_chain=_read("certificate", self.certificate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``timeout_s``: of a call that does not say so itself. ``max_retries``: how often a call is sent again, moves to
    another address that has not been tried aside. Raises InvalidConfig, naming the field."""

    addresses: tuple[str, ...]
    api_key: str | None = None
    tls: Tls | None = None
    timeout_s: float = 600.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        if not self.addresses:
            raise InvalidConfig("addresses", self.addresses, "name at least one host:port")
        for address in self.addresses:
            host, colon, port = address.rpartition(":")
            if not colon or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                raise InvalidConfig("addresses", address, "write host:port, such as localhost:8001 or [::1]:8001")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise InvalidConfig("api_key", "...", "it is visible ASCII characters, as `greenroom keys add` printed it")
        if not 0 < self.timeout_s < math.inf:
            raise InvalidConfig("timeout_s", self.timeout_s, "it is a number of seconds above 0")
        if self.max_retries < 0:
            raise InvalidConfig("max_retries", self.max_retries, "it is a number from 0")

    def options(self) -> list[tuple[str, int | str]]:
        """Of every channel."""
        options: list[tuple[str, int | str]] = [
            ("grpc.enable_retries", 0),  # what may be sent again is decided here, where the key is known
            ("grpc.max_receive_message_length", 64 * 1024 * 1024),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def as_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """One address, several with commas between them, or a list."""
    listed = given.split(",") if isinstance(given, str) else given
    return tuple(address.strip() for address in listed if address.strip())


def _read(field: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(field, str(path), f"it is a PEM file that can be read: {error.strerror}") from error
