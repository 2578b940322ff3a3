"""Keys and limits at the door, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.gateway.doors import doorkeeper
from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import shaped
from tests.scripted_generator import DEADLINE_S, TEXT

COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 100}
AddKey = Callable[..., dict[str, str]]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def add_key(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> AddKey:
    """Makes a key; gives the headers that carry it. Changes of the file are looked for at every request."""
    monkeypatch.setattr(doorkeeper, "LOOK_AGAIN_S", 0.0)

    def add(name: str, **limits: Any) -> dict[str, str]:
        key, text = new_key(name, KeyLimits(**limits), utc_now())
        with changing(keys_file) as present:
            write_keys(keys_file, present.add(key))
        return {"Authorization": f"Bearer {text}"}

    return add


@pytest.fixture
def ann(add_key: AddKey) -> dict[str, str]:
    return add_key("ann")


@pytest.fixture
def config(keys_file: Path, ann: dict[str, str]) -> dict[str, Any]:
    return {"keys_file": keys_file, "open_metrics": False}


async def test_without_a_key_there_is_nothing(server: Server, ann: dict[str, str]) -> None:
    for headers, code in (({}, "missing_api_key"), ({"Authorization": "Bearer none"}, "invalid_api_key")):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")):
            async with server.http.request(method, server.url + path, headers=headers) as response:
                error = shaped(await response.json())
                assert (response.status, error["code"], error["type"]) == (401, code, "invalid_request_error")
                assert response.headers["WWW-Authenticate"].startswith('Bearer realm="greenroom"')
    assert server.generator.seen == []
    assert (await server.post("/v1/completions", COMPLETION, headers=ann))[0] == 200
    assert server.generator.seen[0].tenant == "ann"


async def test_what_needs_no_key(server: Server) -> None:
    for path in ("/health", "/live", "/openapi.json"):
        async with server.http.get(server.url + path) as response:
            assert response.status == 200


async def test_a_stranger_s_body_is_not_read(server: Server) -> None:
    """It says that a megabyte follows, and sends none of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: 1000000\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert b" 401 " in head.split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()


async def test_openai_s_client_knows_the_refusal(server: Server, ann: dict[str, str]) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await client.models.list()
    key = ann["Authorization"].removeprefix("Bearer ")
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
        reply = await client.completions.create(model="org/small", prompt="hello", max_tokens=100)
    assert reply.choices[0].text == TEXT


async def test_keys_come_and_go_while_it_runs(
    server: Server, keys_file: Path, ann: dict[str, str], add_key: AddKey
) -> None:
    bob = add_key("bob")
    assert (await server.post("/v1/completions", COMPLETION, headers=bob))[0] == 200
    with changing(keys_file) as present:
        write_keys(keys_file, present.revoke("bob", utc_now()))
    status, body, _ = await server.post("/v1/completions", COMPLETION, headers=bob)
    assert (status, shaped(body)["code"]) == (401, "invalid_api_key")
    assert (await server.post("/v1/completions", COMPLETION, headers=ann))[0] == 200


async def test_a_rate(server: Server, add_key: AddKey, ann: dict[str, str]) -> None:
    slow = add_key("slow", rate_per_minute=2)
    assert [(await server.post("/v1/completions", COMPLETION, headers=slow))[0] for _ in range(2)] == [200, 200]
    status, body, headers = await server.post("/v1/completions", COMPLETION, headers=slow)
    error = shaped(body)
    assert (status, error["code"], error["type"]) == (429, "rate_limited", "rate_limit_error")
    assert 25 <= int(headers["Retry-After"]) <= 30
    assert (await server.post("/v1/completions", COMPLETION, headers=ann))[0] == 200
    assert len(server.generator.seen) == 3


async def test_places_of_a_key(server: Server, add_key: AddKey, ann: dict[str, str]) -> None:
    few = add_key("few", max_concurrent=1)
    await server.generator.allow(0)
    first = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=few))
    await server.generator.until_active(1)
    status, body, headers = await server.post("/v1/completions", COMPLETION, headers=few)
    assert (status, shaped(body)["code"], headers["Retry-After"]) == (429, "too_many_concurrent", "1")
    other = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=ann))
    await server.generator.until_active(2)
    await server.generator.allow(None)
    assert [(await one)[0] for one in (first, other)] == [200, 200]
    assert (await server.post("/v1/completions", COMPLETION, headers=few))[0] == 200


@pytest.mark.parametrize("many", [{"n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_places_are_of_sequences(server: Server, add_key: AddKey, many: dict[str, Any]) -> None:
    """A small body may ask for a hundred of them."""
    few = add_key("few", max_concurrent=4)
    status, body, _ = await server.post("/v1/completions", {**COMPLETION, "n": 5}, headers=few)
    assert (status, shaped(body)["code"], shaped(body)["param"]) == (400, "too_many_sequences", "n")
    await server.generator.allow(0)
    first = asyncio.ensure_future(server.post("/v1/completions", {**COMPLETION, **many}, headers=few))
    await server.generator.until_active(3)
    status, body, headers = await server.post("/v1/completions", {**COMPLETION, "n": 2}, headers=few)
    assert (status, shaped(body)["code"], headers["Retry-After"]) == (429, "too_many_concurrent", "1")
    second = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=few))
    await server.generator.until_active(4)
    await server.generator.allow(None)
    assert [(await one)[0] for one in (first, second)] == [200, 200]
    assert (await server.post("/v1/completions", {**COMPLETION, "n": 4}, headers=few))[0] == 200


async def test_the_rate_is_of_sequences(server: Server, add_key: AddKey) -> None:
    slow = add_key("slow", rate_per_minute=6)
    assert (await server.post("/v1/completions", {**COMPLETION, "n": 4}, headers=slow))[0] == 200
    status, body, headers = await server.post("/v1/completions", {**COMPLETION, "n": 4}, headers=slow)
    assert (status, shaped(body)["code"]) == (429, "rate_limited")
    assert 15 <= int(headers["Retry-After"]) <= 20
    assert (await server.post("/v1/completions", {**COMPLETION, "n": 2}, headers=slow))[0] == 200
    status, body, _ = await server.post("/v1/completions", {**COMPLETION, "n": 7}, headers=slow)
    assert (status, shaped(body)["code"]) == (429, "rate_limited"), "nothing is left, so its body is not looked at"
    assert len(server.generator.seen) == 6


@pytest.mark.parametrize("where", ["priority", "x-priority"])
async def test_the_highest_priority_of_a_key(server: Server, add_key: AddKey, where: str) -> None:
    plain, urgent = add_key("plain"), add_key("urgent", max_priority=10)

    async def ask(key: dict[str, str], priority: int) -> tuple[int, Any]:
        body = {**COMPLETION, **({"priority": priority} if where == "priority" else {})}
        headers = {**key, **({"X-Priority": str(priority)} if where == "x-priority" else {})}
        status, reply, _ = await server.post("/v1/completions", body, headers=headers)
        return status, reply

    for key, most in ((plain, 0), (urgent, 10)):
        status, body = await ask(key, most + 1)
        error = shaped(body)
        assert (status, error["code"], error["param"]) == (400, "priority_not_allowed", where)
        assert f"at most {most}" in error["message"]
        for allowed in (most, -100):
            assert (await ask(key, allowed))[0] == 200
            assert server.generator.seen[-1].priority == allowed


async def test_a_bad_request_frees_its_place(server: Server, add_key: AddKey) -> None:
    few = add_key("few", max_concurrent=1)
    for _ in range(3):
        assert (await server.post("/v1/completions", {**COMPLETION, "n": 0}, headers=few))[0] == 400
    assert (await server.post("/v1/completions", COMPLETION, headers=few))[0] == 200


@pytest.mark.parametrize("through_log", [True])
async def test_a_retry_shares_the_place_of_what_it_retries(server: Server, add_key: AddKey) -> None:
    few = {**add_key("few", max_concurrent=1), "Idempotency-Key": "order-1"}
    await server.generator.allow(2)
    first = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=few))
    await server.generator.until_active(1)
    first.cancel()
    await asyncio.wait([first])
    retry = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=few))
    other = {**few, "Idempotency-Key": "order-2"}
    status, body, _ = await server.post("/v1/completions", COMPLETION, headers=other)
    assert (status, shaped(body)["code"]) == (429, "too_many_concurrent"), "it goes on, so it counts"
    await server.generator.allow(None)
    status, body, _ = await retry
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
    await server.settled()
    assert (await server.post("/v1/completions", COMPLETION, headers=other))[0] == 200


async def test_tokens_of_a_key(server: Server, add_key: AddKey) -> None:
    short = add_key("short", token_limit=20)
    status, body, _ = await server.post("/v1/completions", COMPLETION, headers=short)
    assert (status, shaped(body)["code"]) == (400, "token_limit_exceeded")
    chat = {"model": "org/small", "prompt": "hello"}
    assert (await server.post("/v1/completions", chat, headers=short))[0] == 200


@pytest.mark.parametrize("what", ["missing", "broken"])
async def test_a_file_that_can_not_be_read_refuses_the_start(server: Server, tmp_path: Path, what: str) -> None:
    from greenroom.gateway import Gateway, GatewayConfig

    path = tmp_path / "other.json"
    if what == "broken":
        path.write_text("{")
    with pytest.raises(InvalidConfig, match="keys_file"):
        Gateway(GatewayConfig(keys_file=path), server.generator, server.text, server.registry)
