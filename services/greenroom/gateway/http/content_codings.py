"""The header Content-Encoding: which codings are taken, and decompression in slices. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from greenroom.core.units import KIB
from greenroom.gateway.errors import ApiError

SLICE = 256 * KIB
"""Bytes of a slice at most: some milliseconds of decompression."""
_FED = 64 * KIB
"""Compressed bytes that are looked at together. A slice begins behind what the one before has left of them."""
_MOST_MEMBERS = 1024
_HEADER = "Content-Encoding"
_TAKEN = ("gzip", "deflate")
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
"""What they are called (RFC 9110, 8.4.1)."""
_GZIP = 16 + zlib.MAX_WBITS
_ZLIB_METHOD = 8
"""The first half byte of zlib's head (RFC 1950, 2.2). No block of deflate that an encoder writes begins with it."""


def inflater_of(headers: Sequence[str]) -> Inflater | None:
    """``headers``: all values of Content-Encoding. None where the body comes as it is. Raises ApiError (415)."""
    said = [one.strip().lower() for header in headers for one in header.split(",")]
    codings = [one for one in said if one not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _NAMES:
        raise ApiError(
            415,
            f"the header {_HEADER} takes {' or '.join(_TAKEN)}, once, or is left out; not {', '.join(codings)!r:.80}",
            code="unsupported_content_encoding",
            param=_HEADER.lower(),
            headers={"Accept-Encoding": ", ".join(_TAKEN)},
        )
    return Inflater(_NAMES[codings[0]])


class Inflater:
    """Decompresses one body. ``coding``: gzip (RFC 1952), or deflate with zlib's head (RFC 1950) or, as some clients
    send it, without (RFC 1951)."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._zlib: zlib._Decompress | None = None
        self._members = 0

    def slices(self, data: bytes) -> Iterator[bytes]:
        """What the body is up to the end of ``data``, but for what came before; ``SLICE`` bytes at most at a time, or
        none. Raises ApiError (400)."""
        for at in range(0, len(data), _FED):
            rest, more = data[at : at + _FED], False
            while rest or more:
                stream = self._stream(rest)
                try:
                    found = stream.decompress(rest, SLICE)
                except zlib.error as error:
                    reason = str(error).rpartition(": ")[2]
                    raise self._broken(f"is not {self._coding}, as its header {_HEADER} says: {reason}") from error
                rest = stream.unused_data if stream.eof else stream.unconsumed_tail
                more = len(found) == SLICE and not stream.eof  # the last bytes that it is fed may stand for many slices
                yield found

    def check_ended(self) -> None:
        """All has come. Raises ApiError (400) where that is not all of a body."""
        if self._zlib is None or not self._zlib.eof:
            raise self._broken(f"was cut off: the end of what its header {_HEADER} says is {self._coding} has not come")

    def _stream(self, rest: bytes) -> zlib._Decompress:
        """Which one is to have the next bytes: of gzip several members may follow one another."""
        if self._zlib is not None and not self._zlib.eof:
            return self._zlib
        if self._zlib is not None and self._coding == "deflate":
            raise self._broken(f"goes on behind the end of what its header {_HEADER} says is deflate")
        self._members += 1
        if self._members > _MOST_MEMBERS:  # each has a price, and may be a few bytes
            raise self._broken(f"has more than {_MOST_MEMBERS} members of gzip, which its header {_HEADER} says it is")
        deflate = zlib.MAX_WBITS if rest[0] % 16 == _ZLIB_METHOD else -zlib.MAX_WBITS
        self._zlib = zlib.decompressobj(wbits=_GZIP if self._coding == "gzip" else deflate)
        return self._zlib

    @staticmethod
    def _broken(what: str) -> ApiError:
        return ApiError(400, f"the body {what}", code="invalid_body", param=_HEADER.lower())
