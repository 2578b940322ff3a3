"""A gateway that leaves: connections that clients hold end with an answer, not under a request that is on its way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.pipeline.gateway.conftest import Server
from tests.scripted_generator import DEADLINE_S

BODY = json.dumps({"model": "org/small", "prompt": "hello", "max_tokens": 3}).encode()


class Connection:
    """One connection that its client keeps, as a pool of connections does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], Any]:
        """Status, headers by their names in small letters, content."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json"] if body else []
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        async with asyncio.timeout(DEADLINE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            content = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(content)

    async def ended(self) -> None:
        """Waits for the other side to end it in order. Nothing may come before that."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def held(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    """Connections that have been used and are idle."""
    made = [Connection(*await asyncio.open_connection("127.0.0.1", server.port)) for _ in range(count)]
    for connection in made:
        status, headers, _ = await connection.ask("GET", "/live")
        assert (status, headers.get("connection")) == (200, None)
    yield made
    for connection in made:
        await connection.close()


LONG = {"drain_timeout_s": DEADLINE_S, "linger_s": DEADLINE_S}


@pytest.mark.parametrize("config", [LONG])
async def test_every_connection_is_used_once_more_and_then_it_ends_at_once(server: Server) -> None:
    async with held(server, 3) as connections:
        began = time.monotonic()
        stopping = asyncio.create_task(server.gateway.stop())
        while server.gateway.unready is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for connection, (method, path) in zip(
            connections, [("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/live")], strict=True
        ):
            assert not stopping.done()
            status, headers, body = await connection.ask(method, path, BODY if method == "POST" else b"")
            assert headers["connection"] == "close"
            assert (status, body.get("status")) == (200, "live") if path == "/live" else status == 503
            await connection.ended()
        await asyncio.wait_for(stopping, DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S / 2, "no connection is left to wait for"


@pytest.mark.parametrize("config", [LONG])
async def test_a_connection_on_which_a_stream_ends_meanwhile_is_kept_for_its_next_request(server: Server) -> None:
    """Its stream began before the gateway left, so its headers did not say that it was the last on the connection."""
    await server.generator.allow(2)
    async with server.http.post(server.url + "/v1/completions", json={**json.loads(BODY), "stream": True}) as response:
        stopping = asyncio.create_task(server.gateway.stop())
        while server.gateway.unready is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await server.generator.allow(None)
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert "Connection" not in response.headers
    assert not stopping.done()
    status, body, headers = await server.post("/v1/completions", json.loads(BODY))
    assert (status, body["error"]["code"], headers["Connection"]) == (503, "draining", "close")
    await asyncio.wait_for(stopping, DEADLINE_S)


@pytest.mark.parametrize("config", [{"drain_timeout_s": DEADLINE_S, "linger_s": 0.1}])
async def test_an_unused_connection_is_not_waited_for_longer(server: Server) -> None:
    async with held(server, 1) as [connection]:
        began = time.monotonic()
        await asyncio.wait_for(server.gateway.stop(), DEADLINE_S)
        assert time.monotonic() - began >= 0.1
        await connection.ended()


@pytest.mark.parametrize("config", [{"drain_timeout_s": 0.05, "linger_s": DEADLINE_S}])
async def test_it_is_part_of_the_time_to_drain(server: Server) -> None:
    async with held(server, 1) as [connection]:
        await asyncio.wait_for(server.gateway.stop(), DEADLINE_S / 2)
        await connection.ended()
