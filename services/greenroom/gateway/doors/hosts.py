"""What web pages may ask: the names by which the server may be called, and the origins whose pages read its answers.

A page of any site may send requests to a server on the machine of whoever looks at it. The browser hides the answers
from the page. It does not where the page's own name was made to resolve to this machine ("DNS rebinding"), but then the
header ``Host`` names a host that this server is not. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from greenroom.core.errors import InvalidConfig
from greenroom.core.hosts import is_loopback
from greenroom.gateway.errors import ApiError
from greenroom.gateway.replies.reply_headers import HINTS_HEADER, INFER_LENGTH_HEADER, REPLY_ID_HEADER

ANY = "*"
EXPOSED = (
    "X-Request-Id", REPLY_ID_HEADER, HINTS_HEADER, INFER_LENGTH_HEADER, "Retry-After", "WWW-Authenticate",
)  # fmt: skip
"""Headers of a reply that a page of an allowed origin may read. Browsers allow a few others by themselves."""
_PREFLIGHT_KEPT_S = 600
_METHODS = "GET, POST"
_USUAL_HEADERS = "Authorization, Content-Type, Idempotency-Key, X-Request-Id"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MOST_HEADER_CHARS = 2048
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]+\]")


class Hosts:
    """The names by which the server may be called: those of this machine's loopback, ``listening`` and ``allowed``. A
    ``*`` in ``allowed`` allows any. Ports are not compared. Raises InvalidConfig for an ``allowed`` that is no name."""

    def __init__(self, listening: str, allowed: Iterable[str] = ()) -> None:
        names = list(allowed)
        for name in names:
            if name != ANY and name_in(name) is None:
                raise InvalidConfig(
                    "allowed_hosts", name, f"names without a port such as gpu-box.lan, or {ANY} for any"
                )
        self._any = ANY in names
        self._names = {found for found in map(name_in, [listening, *names]) if found is not None}

    def check(self, said: Sequence[str], *, probe: bool = False) -> None:
        """``said``: the values of the header ``Host``; none is fine, since every browser sends one. ``probe``: any
        address is fine too, since no name leads a page there. Raises ApiError (403)."""
        for host in said:
            if not self._allows(host) and not (probe and _is_address(host)):
                raise ApiError(
                    403,
                    f"the header Host says {host!r:.100}, which is not known as a name of this server: call it as "
                    "localhost or 127.0.0.1, or start it with --allowed-hosts NAME, or with API keys (--keys-file)",
                    code="host_not_allowed",
                    param="Host",
                )

    def _allows(self, host: str) -> bool:
        if self._any:
            return True
        name = name_in(host)
        return name is not None and (name in self._names or _is_loopback(name))


def name_in(host: str) -> str | None:
    """The name or address in ``host``, in lower case and without its port. None where there is none."""
    name, colon, port = host.rpartition(":")
    if "[" not in host and host.count(":") > 1:
        name = f"[{host}]"  # an IPv6 address, as an option has it
    elif not colon or not (port.isascii() and port.isdecimal()) or ("[" in host and not name.endswith("]")):
        name = host
    return name.lower().removesuffix(".").strip("[]") if _NAME.fullmatch(name) else None


def _is_address(host: str) -> bool:
    name = name_in(host)
    try:
        return name is not None and bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    """Browsers resolve ``localhost`` and the names below it by themselves, so no name server can point them here."""
    return name.endswith(".localhost") or is_loopback(name)


class Origins:
    """The origins whose pages may read the answers (CORS). Without any, no reply has a header about it. Raises
    InvalidConfig for what is no origin.

    There are no cookies, and a page sends its key as a header, so credentials are not allowed.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed)
        for origin in self._allowed:
            if origin != ANY and not _is_origin(origin):
                allowed_ = f"origins as a browser sends them, such as https://chat.example:8443, or {ANY} for any"
                raise InvalidConfig("allowed_origins", origin, allowed_)

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Headers for every reply to a request with this ``Origin``."""
        if not self._allowed:
            return {}
        if ANY in self._allowed:
            return {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": ", ".join(EXPOSED)}
        vary = {"Vary": "Origin"}  # else a cache gives one origin's answer to another
        if origin is None or origin not in self._allowed:
            return vary
        return {
            **vary,
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": ", ".join(EXPOSED),
        }

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The reply's headers for a preflight: a browser asks, with these ``headers``, whether a page may send a
        request. Raises ApiError (403) where it may not."""
        origin = headers.get("Origin")
        if ANY not in self._allowed and origin not in self._allowed:
            raise ApiError(
                403,
                f"pages of {origin!r:.100} may not use this server: start it with --allowed-origins {ANY}, or with "
                "theirs among the origins",
                code="origin_not_allowed",
                param="Origin",
            )
        asked = headers.get("Access-Control-Request-Headers", "")
        named = len(asked) <= _MOST_HEADER_CHARS and _HEADER_NAMES.fullmatch(asked) is not None
        return {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked if named else _USUAL_HEADERS,
            "Access-Control-Max-Age": str(_PREFLIGHT_KEPT_S),
        }


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers


def _is_origin(text: str) -> bool:
    """Whether ``text`` is an origin as browsers write it: without a path or a slash at the end."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    named = parts.hostname is not None and name_in(parts.hostname) is not None
    return text == "null" or (
        bool(parts.scheme) and named and port != 0 and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text
    )
