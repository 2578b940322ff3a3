"""Bodies that come compressed, and headers that say how a body comes, at an infer call."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.core.units import MIB
from tests.pipeline.inferences.conftest import Served, body
from tests.pipeline.inferences.images import png
from tests.waiting import DEADLINE_S, until

JSON = {"Content-Type": "application/json"}


def plain(pad: bytes = b"") -> bytes:
    return json.dumps(body([png()])).encode() + pad


def raw_deflate(raw: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(raw) + packer.flush()


async def sent(served: Served, raw: Any, **headers: str) -> tuple[int, Any, Any]:
    given = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with served.http.post(served.infer_url, data=raw, headers=given) as response:
        assert response.content_type == "application/json", await response.text()
        assert response.headers["X-Request-Id"]
        assert response.headers["Server"] == "greenroom"
        return response.status, await response.json(), response.headers


TAKEN = {
    "gzip": ("gzip", gzip.compress(plain())),
    "another case": ("GZip", gzip.compress(plain())),
    "an old name": ("x-gzip", gzip.compress(plain())),
    "two members": ("gzip", gzip.compress(plain()[:50]) + gzip.compress(plain()[50:])),
    "deflate": ("deflate", zlib.compress(plain())),
    "deflate without zlib's head": ("deflate", raw_deflate(plain())),
    "identity": ("identity", plain()),
    "identity among others": ("identity, gzip", gzip.compress(plain())),
    "more than a slice": ("gzip", gzip.compress(plain(b" " * 3 * MIB))),
    "as it is": ("", plain()),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("pieces", [1, 7], ids=["at once", "in chunks"])
async def test_codings_that_are_taken(served: Served, name: str, pieces: int) -> None:
    coding, raw = TAKEN[name]

    async def chunks() -> AsyncIterator[bytes]:
        step = len(raw) // pieces + 1
        for at in range(0, len(raw), step):
            yield raw[at : at + step]

    status, reply, _ = await sent(served, chunks() if pieces > 1 else raw, Content_Encoding=coding)
    assert status == 200, reply


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip, deflate", "\x22gzip\x22", "x" * 300])
async def test_other_codings_are_refused_by_name(served: Served, coding: str, caplog: pytest.LogCaptureFixture) -> None:
    status, reply, headers = await sent(served, gzip.compress(plain()), Content_Encoding=coding)
    assert (status, list(reply)) == (415, ["error"])
    assert "Content-Encoding takes gzip or deflate" in reply["error"]
    assert coding[:20].replace('"', "") in reply["error"].replace('"', "")
    assert len(reply["error"]) < 250
    assert headers["Accept-Encoding"] == "gzip, deflate"
    assert not [record for record in caplog.records if record.exc_info]


BROKEN = {
    "no gzip": ("gzip", b"not gzip at all", "is not gzip"),
    "JSON": ("gzip", plain(), "is not gzip"),
    "gzip and more": ("gzip", gzip.compress(plain()) + b"more", "is not gzip"),
    "a wrong checksum": ("gzip", gzip.compress(plain())[:-8] + bytes(8), "incorrect data check"),
    "a wrong length": ("gzip", gzip.compress(plain())[:-4] + bytes(4), "incorrect length check"),
    "no deflate": ("deflate", b"not deflate", "is not deflate"),
    "deflate and more": ("deflate", zlib.compress(plain()) + b"more", "goes on behind the end"),
    "gzip without its trailer": ("gzip", gzip.compress(plain())[:-8], "was cut off"),
    "gzip without its last byte": ("gzip", gzip.compress(plain())[:-1], "was cut off"),
    "half of gzip": ("gzip", gzip.compress(plain())[:60], "was cut off"),
    "half of the second member": ("gzip", gzip.compress(plain()) + gzip.compress(b" ")[:12], "was cut off"),
    "half of deflate": ("deflate", zlib.compress(plain())[:60], "was cut off"),
    "nothing": ("gzip", b"", "was cut off"),
    "thousands of members": ("gzip", gzip.compress(b" ") * 5000 + gzip.compress(plain()), "members"),
}


@pytest.mark.parametrize("host", ["127.0.0.1", "elsewhere"], ids=["read", "refused before it is read"])
@pytest.mark.parametrize("name", BROKEN)
async def test_a_body_that_is_not_what_its_encoding_says(
    served: Served, name: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the client's fault, so the log has no traceback of it."""
    coding, raw, reason = BROKEN[name]
    status, reply, _ = await sent(served, raw, Content_Encoding=coding, Host=host)
    if host == "127.0.0.1":
        assert (status, list(reply)) == (400, ["error"])
        assert reason in reply["error"]
        assert coding in reply["error"]
    else:
        assert status == 403
    server = served.gateway._gateway._runner.server
    assert server is not None
    open_ones = list(server.connections)
    status, _, _ = await served.post(body([png()]))
    assert status == 200
    if host == "127.0.0.1":
        assert list(server.connections) == open_ones, "the same connection serves on"
    status, _, _ = await served.post(body([png()]), headers={"Connection": "close"})
    assert status == 200
    await until(lambda: not server.connections, "aiohttp has read on")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("front", [{"body_timeout_s": 0.5}])
async def test_a_body_whose_chunks_are_broken(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp's compiled parser waits for more, the other one says so."""
    head = "POST /v2/models/board/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
    writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await until(lambda: served.gateway._gateway._admission.in_flight == 1, "it is read")
    writer.write(b"no size\r\n")
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)).decode().lower()
    assert head.split()[1] in ("400", "408")
    length = int(head.partition("content-length: ")[2].split()[0])
    assert (await asyncio.wait_for(reader.readexactly(length), DEADLINE_S)).startswith(b'{"error":"the body ')
    writer.close()
    await writer.wait_closed()
    await until(lambda: not served.gateway._gateway._runner.server.connections)  # type: ignore[union-attr]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("front", [{"max_infer_body_bytes": MIB, "body_timeout_s": 20.0}])
@pytest.mark.parametrize("form", ["decompressed", "on the wire"])
async def test_both_sizes_of_a_body_are_bounded(served: Served, form: str) -> None:
    """A bomb ends soon after it is more than is taken; so does what never becomes anything."""
    packer = zlib.compressobj(wbits=31)
    if form == "decompressed":
        part, end = packer.compress(bytes(8 * MIB)) + packer.flush(zlib.Z_SYNC_FLUSH), 1000
    else:
        part, end = packer.compress(b"") + packer.flush(zlib.Z_SYNC_FLUSH), 1000
        empty = b"\x00\x00\x00\xff\xff"  # a stored block of nothing
        part += empty * 20_000
    parts = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal parts
        yield part
        rest = part if form == "decompressed" else empty * 20_000
        while parts < end:
            parts += 1
            yield rest
            await asyncio.sleep(0)

    status, reply, _ = await sent(served, chunks(), Content_Encoding="gzip")
    assert (status, list(reply)) == (413, ["error"])
    held = served.gateway._gateway._requests._held
    await until(lambda: held.total == 0, "nothing is held")


async def test_others_are_answered_while_a_large_body_is_decompressed(served: Served) -> None:
    held = served.gateway._gateway._requests._held
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(held.total)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    status, _, _ = await sent(served, gzip.compress(bytes(30 * MIB)), Content_Encoding="gzip")
    looking.cancel()
    assert status == 400, "zeros are no JSON"
    assert len(seen) > 100, "it grows by slices, with turns of others between them"


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", '"iso-8859-1"'])
async def test_json_in_another_charset_is_refused(served: Served, charset: str) -> None:
    status, reply, _ = await sent(served, plain(), Content_Type=f"application/json; charset={charset}")
    assert (status, list(reply)) == (415, ["error"])
    assert "UTF-8" in reply["error"]


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf8"'])
async def test_json_that_says_utf_8_is_taken(served: Served, charset: str) -> None:
    status, reply, _ = await sent(served, plain(), Content_Type=f"application/json; charset={charset}")
    assert status == 200, reply
