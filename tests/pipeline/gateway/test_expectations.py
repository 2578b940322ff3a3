"""The header Expect: what is asked for is met or refused, in the interface's own shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import COMPLETION, shaped
from tests.scripted_generator import DEADLINE_S

BODY = json.dumps(COMPLETION).encode()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    def ask(self, line: str, *headers: str) -> None:
        lines = [f"{line} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
        self.send("\r\n".join(lines).encode())

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        first, *lines = raw.decode().strip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ") for line in lines)}

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        status, headers = await self.head()
        body = await asyncio.wait_for(self._reader.readexactly(int(headers["content-length"])), DEADLINE_S)
        return status, headers, json.loads(body)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def connection(server: Server) -> AsyncIterator[Connection]:
    made = Connection(*await asyncio.open_connection("127.0.0.1", server.port))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("line", "route"),
    [
        ("POST /v1/completions", "/v1/completions"),
        ("POST /v2/models/board/infer", "/v2/models/{name}/infer"),
        ("GET /v1/models", "/v1/models"),
        ("GET /live", "/live"),
        ("POST /nothing/here", "unmatched"),
        ("POST /v2/nothing", "unmatched"),
        ("DELETE /v1/models", "unmatched"),
        ("OPTIONS *", "unmatched"),
        ("GET http://localhost", "unmatched"),
    ],
)
@pytest.mark.parametrize("expect", [["200-ok"], ["100-continue, 200-ok"], ["100-continue", "x"], ["x" * 300]])
async def test_an_expectation_that_is_not_known_is_417(
    server: Server, connection: Connection, line: str, route: str, expect: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = [f"Expect: {one}" for one in expect]
    connection.ask(line, *given, "X-Request-Id: mine", f"Content-Length: {len(BODY)}")
    connection.send(BODY)
    status, headers, reply = await connection.answer()
    assert (status, headers["x-request-id"], headers["content-type"]) == (417, "mine", "application/json")
    assert headers["server"] == "greenroom"
    message = reply["error"] if " /v2" in line else shaped(reply)["message"]
    assert "Expect takes 100-continue" in message
    assert len(message) < 200
    await server.over(route, 417)
    assert server.metric("http_errors_total", code="expectation_failed") == 1
    assert not [record for record in caplog.records if record.exc_info]
    connection.ask("GET /live")
    assert (await connection.answer())[0] == 200, "the connection serves on"


async def test_a_connect_is_refused_as_well(server: Server, connection: Connection) -> None:
    """It has neither path nor body."""
    connection.ask("CONNECT host:443", "Expect: 200-ok", "X-Request-Id: mine")
    status, headers, _ = await connection.answer()
    assert (status, headers["x-request-id"]) == (417, "mine")
    await server.over("unmatched", 417)


@pytest.mark.parametrize("word", ["100-continue", "100-Continue"])
async def test_who_waits_for_100_is_told_to_go_on(server: Server, connection: Connection, word: str) -> None:
    connection.ask("POST /v1/completions", f"Expect: {word}", f"Content-Length: {len(BODY)}")
    assert (await connection.head())[0] == 100
    connection.send(BODY)
    status, headers, reply = await connection.answer()
    assert (status, "x-request-id" in headers) == (200, True), reply


async def test_an_empty_expectation_asks_for_nothing(server: Server, connection: Connection) -> None:
    connection.ask("POST /v1/completions", "Expect:", f"Content-Length: {len(BODY)}")
    connection.send(BODY)
    assert (await connection.answer())[0] == 200


async def test_http_1_0_has_no_expectations(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /live HTTP/1.0\r\nHost: localhost\r\nExpect: 200-ok\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert b" 200 " in answer.split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()
