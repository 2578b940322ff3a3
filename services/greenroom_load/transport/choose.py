"""Which transport an address asks for."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from greenroom.core.errors import InvalidConfig
from greenroom_load.transport.base import Style, Transport
from greenroom_load.transport.http import HttpTransport

_ALLOWED = "http://HOST:PORT or https://HOST:PORT for HTTP, grpc://HOST:PORT or grpcs://HOST:PORT for gRPC"


def transport_for(url: str, style: Style) -> Transport:
    """Raises InvalidConfig for an address that is none, or for certificates that can not be read."""
    if style.ca_file is not None:
        try:
            ssl.create_default_context(cafile=style.ca_file)
        except OSError as error:  # SSLError is one
            raise InvalidConfig("ca_file", str(style.ca_file), f"a file of PEM certificates ({error})") from error
    try:
        parts = urlsplit(url)
        valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise InvalidConfig("url", url, _ALLOWED) from None
    if not valid or parts.query or parts.fragment or parts.username is not None:
        raise InvalidConfig("url", url, _ALLOWED)
    match parts.scheme:
        case "http" | "https":
            return HttpTransport(url, style)
        case "grpc" | "grpcs" if parts.port is not None and parts.path in ("", "/"):
            return _grpc(parts.netloc, parts.scheme == "grpcs", style)
        case _:
            raise InvalidConfig("url", url, _ALLOWED)


def _grpc(target: str, secure: bool, style: Style) -> Transport:
    try:
        from greenroom_load.transport.grpc import GrpcTransport
    except ModuleNotFoundError as error:
        raise InvalidConfig("url", f"grpc://{target}", f"used with {error.name}, which is not installed") from error
    return GrpcTransport(target, style, secure=secure)
