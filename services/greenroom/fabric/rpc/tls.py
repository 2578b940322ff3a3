"""Certificates, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """``certificate``, ``key``: the server's own, PEM. ``client_ca``: where given, only callers with a certificate
    signed by it are served."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises InvalidConfig where a file can not be read."""
        pair = (_read("tls_key", self.key), _read("tls_certificate", self.certificate))
        ca = _read("tls_client_ca", self.client_ca) if self.client_ca is not None else None
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialerTls:
    """``ca``: the authority that signs the servers' certificates; None: those that the machine trusts. ``certificate``,
    ``key``: our own, both or neither. ``server_name``: the name in every server's certificate, where that is not its
    address."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given = "tls_certificate" if self.key is None else "tls_key"
            raise InvalidConfig(given, str(self.certificate or self.key), "a certificate and its key come together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidConfig where a file can not be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls_ca", self.ca) if self.ca is not None else None,
            private_key=_read("tls_key", self.key) if self.key is not None else None,
            certificate_chain=_read("tls_certificate", self.certificate) if self.certificate is not None else None,
        )


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(field, str(path), f"it is a PEM file that can be read: {error.strerror}") from error
