"""Streams as bytes: framing, keep-alive, clients that leave, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from greenroom.core.errors import Saturated
from greenroom.core.generation import FinishReason
from greenroom.gateway.requests.generations import Generations
from tests.pipeline.gateway.conftest import Server
from tests.scripted_generator import DEADLINE_S, TEXT

CHAT: dict[str, Any] = {
    "model": "org/small",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 100, "stream": True}


def events(raw: bytes) -> list[tuple[str, Any]]:
    """What a strict reader of server-sent events gets: name and data, comments left out."""
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


async def test_framing_and_headers(server: Server) -> None:
    async with server.http.post(server.url + "/v1/chat/completions", json=CHAT) as response:
        raw = await response.read()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Request-Id"]
    *parts, usage, done = [data for _, data in events(raw)]
    assert done == "[DONE]"
    assert raw.endswith(b"data: [DONE]\n\n")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1]["choices"][0]["delta"] == {}
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


async def test_without_include_usage_no_part_speaks_of_it(server: Server) -> None:
    async with server.http.post(server.url + "/v1/completions", json=COMPLETION) as response:
        *parts, done = [data for _, data in events(await response.read())]
    assert done == "[DONE]"
    assert "".join(part["choices"][0]["text"] for part in parts) == TEXT
    assert all("usage" not in part for part in parts)


async def test_text_comes_as_it_is_generated(server: Server) -> None:
    await server.generator.allow(2)
    async with server.http.post(server.url + "/v1/completions", json=COMPLETION) as response:
        first = json.loads((await response.content.readuntil(b"\n\n"))[6:])
        assert first["choices"][0]["text"]
        assert len(server.generator.active) == 1
        await server.generator.allow(None)
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("config", [{"keep_alive_s": 0.05}])
async def test_silence_is_filled_with_comments_even_before_the_first_token(server: Server) -> None:
    await server.generator.allow(0)
    async with server.http.post(server.url + "/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        for _ in range(3):  # and nothing else: clients take whatever is data for the first token
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        await server.generator.allow(None)
        rest = events(await response.content.read())
    assert rest[0][1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(data["choices"][0]["delta"]["content"] for _, data in rest[:-3]) == TEXT


async def test_each_choice_is_opened_with_its_own_first_token(server: Server) -> None:
    """One choice has no text. It is opened and closed all the same."""
    ends = server.generator.model.eos_token_ids
    server.generator.says = lambda request: (
        server.generator._text_of(request) if request.request_id[-1] == "0" else ends
    )
    async with server.http.post(server.url + "/v1/chat/completions", json={**CHAT, "n": 2}) as response:
        *parts, _, _ = [data["choices"][0] for _, data in events(await response.read())[:-2]] + [None, None]
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert [part["delta"].get("role") for part in own] == ["assistant"] + [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_usage_in_every_part(server: Server, path: str, include_usage: bool) -> None:
    """vLLM's ``continuous_usage_stats``: of the part's own choice, up to it. The last part has the sum."""
    body = {**(CHAT if path.startswith("chat") else COMPLETION), "n": 2, "max_tokens": 9}
    options = {"continuous_usage_stats": True, **({"include_usage": True} if include_usage else {})}
    async with server.http.post(f"{server.url}/v1/{path}", json={**body, "stream_options": options}) as response:
        *parts, done = [data for _, data in events(await response.read())]
    assert done == "[DONE]"
    prompt = len(server.generator.seen[0].prompt_ids)
    if include_usage:
        last = parts.pop()
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": prompt, "completion_tokens": 18, "total_tokens": prompt + 18}
    for index in (0, 1):
        own = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        assert all(usage["prompt_tokens"] == prompt for usage in own)
        assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in own)
        assert counts == sorted(counts)
        assert counts[-1] == 9
        assert counts[0] == (0 if path.startswith("chat") else 1), "what opens a choice is no token"
        assert len(set(counts)) > 4


@pytest.mark.parametrize(
    ("attribute", "code", "message"),
    [
        ("fail_at", "generation_failed", "an expert could not be read"),
        ("raise_at", "internal_error", "its log says why"),
        ("cancel_at", "cancelled", "the generation was cancelled"),
        ("vanish_at", "generation_failed", "without an outcome"),
    ],
)
async def test_a_failure_in_the_middle_is_an_event_and_the_end(
    server: Server, attribute: str, code: str, message: str
) -> None:
    setattr(server.generator, attribute, 3)
    async with server.http.post(server.url + "/v1/chat/completions", json=CHAT) as response:
        raw = await response.read()
    *parts, (name, last) = events(raw)
    assert len(parts) > 1
    assert name == "error"
    assert message in last["error"]["message"]
    assert last["error"]["code"] == code
    assert b"[DONE]" not in raw
    await server.over("/v1/chat/completions")
    assert server.metric("http_errors_total", code=code) == 1


@pytest.mark.parametrize("config", [{"request_timeout_s": 1.0}])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_has_a_deadline(server: Server, stream: bool) -> None:
    await server.generator.allow(2)
    body = {**COMPLETION, "stream": stream}
    async with server.http.post(server.url + "/v1/completions", json=body) as response:
        raw = await response.read()
    if stream:
        name, last = events(raw)[-1]
        assert (response.status, name) == (200, "error")
    else:
        last = json.loads(raw)
        assert response.status == 504
    assert last["error"]["code"] == "expired"
    await server.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_leaves_cancels_at_once(server: Server, stream: bool, tokens: int) -> None:
    """Queued (no token yet) or running, streaming or not: nothing is written to it that could tell."""
    await server.generator.allow(tokens)
    body = {**COMPLETION, "stream": stream, "n": 2}
    post = asyncio.ensure_future(server.http.post(server.url + "/v1/completions", json=body))
    await server.generator.until_active(2)
    if stream and tokens:
        (await post).close()
    else:
        post.cancel()
        await asyncio.wait([post])
    await server.settled()
    assert set(server.generator.outcomes.values()) == {FinishReason.CANCELLED}
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0


async def test_fifty_streams_and_a_third_of_them_cancelled(server: Server) -> None:
    choose = random.Random(7)
    leaving = set(choose.sample(range(50), 17))
    await server.generator.allow(5)

    async def read(place: int) -> str | None:
        body = {**COMPLETION, "seed": place, "max_tokens": 30}
        async with server.http.post(server.url + "/v1/completions", json=body) as response:
            if place in leaving:
                await response.content.readuntil(b"\n\n")
                return None
            *parts, done = [data for _, data in events(await response.read())]
            assert done == "[DONE]"
            return "".join(part["choices"][0]["text"] for part in parts)

    readers = [asyncio.ensure_future(read(place)) for place in range(50)]
    await server.generator.until(lambda: len(server.generator.seen) == 50 and len(server.generator.closed) == 17)
    await server.generator.allow(None)
    texts = await asyncio.wait_for(asyncio.gather(*readers), DEADLINE_S)
    await server.settled()
    assert [place for place, text in enumerate(texts) if text is None] == sorted(leaving)
    for request in server.generator.seen:
        place = request.sampling.seed
        assert place is not None
        if place not in leaving:
            assert texts[place] == server.text.tokenizer.decode(server.generator._text_of(request)[:30])
    assert sorted(server.generator.closed) == sorted(request.request_id for request in server.generator.seen)
    success = {reason: _ended(server, reason) for reason in ("length", "cancelled", "stop", "failed")}
    assert success["cancelled"] == 17
    assert success["length"] + success["stop"] == 33


def _ended(server: Server, reason: str) -> float:
    return server.metric("request_success_total", model_name="org/small", finished_reason=reason)


async def test_one_refused_choice_refuses_the_whole_before_anything_is_sent(server: Server) -> None:
    server.generator.refusal = Saturated("no room for the second", retry_after_s=2.5)
    server.generator.refuse_from = 1
    await server.generator.allow(0)
    status, body, headers = await server.post("/v1/completions", {**COMPLETION, "n": 3})
    assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "saturated", "3")
    await server.settled()
    assert list(server.generator.outcomes.values()) == [FinishReason.CANCELLED]


class SlowClient:
    """A connection with a small receive buffer that sends a request and then reads nothing."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(("127.0.0.1", port))
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + raw)

    def close(self) -> None:
        self._socket.close()


async def test_a_client_that_leaves_while_its_reply_opens_is_no_fault_of_ours(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What aiohttp raises then, before its connection is known to be lost."""
    prepare = web.StreamResponse.prepare

    async def closing(response: web.StreamResponse, request: web.BaseRequest) -> Any:
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", closing)
    async with server.http.post(f"{server.url}/v1/completions", json=COMPLETION):
        pass
    await server.settled()
    await server.over("/v1/completions", 499)
    assert server.metric("http_errors_total", code="client_gone") == 1


async def test_a_client_that_leaves_with_its_whole_reply_was_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As curl does, while the server still tidies up."""
    leave = Generations.__aexit__

    async def late(generations: Generations, *error: Any) -> None:
        await leave(generations, *error)
        await asyncio.Event().wait()

    monkeypatch.setattr(Generations, "__aexit__", late)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json=COMPLETION) as response,
    ):
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await server.over("/v1/completions", 200)


@pytest.mark.parametrize("config", [{"slow_client_timeout_s": 0.3}])
async def test_a_slow_reader_is_dropped_and_its_request_cancelled(server: Server) -> None:
    """The reply is larger than the sockets' buffers. Another client is served meanwhile."""
    server.generator.model = _with_length(server, 10_000_000)
    body = {**COMPLETION, "ignore_eos": True, "max_tokens": 5_000_000, "logprobs": 20}
    slow = SlowClient(server.port, body)
    try:
        await server.generator.until(lambda: len(server.generator.seen) == 1)
        status, reply, _ = await server.post(
            "/v1/completions", {"model": "org/small", "prompt": "hello", "max_tokens": 100}
        )
        assert (status, reply["choices"][0]["text"]) == (200, TEXT)
        await server.settled()
    finally:
        slow.close()
    assert server.metric("http_errors_total", code="client_gone") == 1
    assert list(server.generator.outcomes.values()).count(FinishReason.CANCELLED) == 1
    assert server.metric("generation_tokens_total") < 100_000


def _with_length(server: Server, max_model_len: int) -> Any:
    return replace(server.generator.model, max_model_len=max_model_len)
