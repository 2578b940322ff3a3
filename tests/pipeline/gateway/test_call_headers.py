"""SLO, priority, timeouts, idempotency keys, and the ends that come of them, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.core.errors import Conflict
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Slo, Token
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import shaped
from tests.pipeline.gateway.test_streams import events
from tests.scripted_generator import DEADLINE_S, TEXT

COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 100}
CHAT: dict[str, Any] = {"model": "org/small", "messages": [{"role": "user", "content": "hello"}]}
KEY = {"Idempotency-Key": "order-1"}


def ends_with(server: Server, monkeypatch: pytest.MonkeyPatch, end: Finished, tokens: int) -> asyncio.Event:
    """Every request gives so many tokens. Once the event is set, it gives ``end``."""
    gate = asyncio.Event()

    async def generate(request: GenerationRequest) -> AsyncIterator[Event]:
        ids = server.generator.says(request)
        for index in range(tokens):
            yield Token(index, ids[index])
        async with asyncio.timeout(DEADLINE_S):
            await gate.wait()
        yield end

    monkeypatch.setattr(server.generator, "generate", generate)
    return gate


async def test_what_is_hoped_for_reaches_the_generator(server: Server) -> None:
    headers = {"X-SLO-TTFT-Ms": "200", "x-slo-e2e-ms": "3000.5", "X-Priority": "-5"}
    body = {**CHAT, "slo": {"tpot_ms": 40}, "timeout": 12.5, "task_type": "sort"}
    assert (await server.post("/v1/chat/completions", body, headers=headers))[0] == 200
    [request] = server.generator.seen
    assert request.slo == Slo(ttft_ms=200, tpot_ms=40, e2e_ms=3000.5)
    assert (request.priority, request.timeout_s, request.task_type) == (-5, 12.5, "sort")
    assert (request.prompt, request.tenant, request.keyed, request.digest) == ("hello", "", False, b"")


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, {}, "x-slo-ttft-ms"),
        ({"x-priority": "1000"}, {}, "x-priority"),
        ({"x-priority": "1"}, {"priority": 2}, "priority"),
        ({"x-slo-e2e-ms": "10"}, {"slo": {"e2e_ms": 11}}, "slo.e2e_ms"),
        ({}, {"slo": {"e2e_ms": 0}}, "slo"),
        ({}, {"slo": {"latency": 1}}, "slo.latency"),
        ({}, {"slo": 100}, "slo"),
        ({}, {"timeout": 4000}, "timeout"),
        ({}, {"priority": 101}, "priority"),
        ({"Idempotency-Key": "a b"}, {}, "idempotency-key"),
    ],
)
async def test_what_can_not_be_meant_is_refused(
    server: Server, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    status, body, _ = await server.post("/v1/completions", {**COMPLETION, **fields}, headers=headers)
    assert (status, shaped(body)["param"]) == (400, param)
    assert server.generator.seen == []


async def test_a_request_s_own_timeout(server: Server) -> None:
    await server.generator.allow(2)
    status, body, _ = await server.post("/v1/completions", {**COMPLETION, "timeout": 0.2})
    assert (status, shaped(body)["code"]) == (504, "expired")
    assert "within 0.2 seconds" in body["error"]["message"]
    await server.settled()


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (Finished(FinishReason.EXPIRED, 1, 0, "its deadline passed while it waited"), 504, "expired"),
        (Finished(FinishReason.SHED, 1, 0, "it had waited 30 s for a place"), 429, "shed"),
        (Finished(FinishReason.FAILED, 1, 0, "three workers were lost under it"), 500, "generation_failed"),
        (Finished(FinishReason.CANCELLED, 1, 0, "cancelled by another call"), 503, "cancelled"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ends_before_the_first_token(
    server: Server, monkeypatch: pytest.MonkeyPatch, end: Finished, status: int, code: str, stream: bool
) -> None:
    ends_with(server, monkeypatch, end, 0).set()
    answered, body, headers = await server.post("/v1/completions", {**COMPLETION, "stream": stream})
    error = shaped(body)
    assert (answered, error["code"]) == (status, code)
    assert error["message"] == end.error
    assert ("Retry-After" in headers) == (status in (429, 503))
    assert server.metric("request_success_total", model_name="org/small", finished_reason=end.reason.value) == 1


@pytest.mark.parametrize("reason", [FinishReason.EXPIRED, FinishReason.SHED])
async def test_ends_in_the_middle_of_a_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch, reason: FinishReason
) -> None:
    gate = ends_with(server, monkeypatch, Finished(reason, 1, 3), 3)
    async with server.http.post(server.url + "/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        gate.set()
        raw = await response.read()
    name, last = events(raw)[-1]
    assert (response.status, name, last["error"]["code"]) == (200, "error", reason.value)
    assert b"[DONE]" not in raw


async def test_replies_carry_the_request_s_id(server: Server) -> None:
    status, body, headers = await server.post("/v1/chat/completions", CHAT)
    base = headers["Greenroom-Request-Id"]
    assert (status, body["id"]) == (200, f"chatcmpl-{base}")
    assert server.generator.seen[0].request_id == f"{base}-0"
    _, _, headers = await server.post("/v1/chat/completions", {**CHAT, "n": 0})
    assert len(headers["Greenroom-Request-Id"]) == 40
    async with server.http.get(server.url + "/live") as response:
        assert "Greenroom-Request-Id" not in response.headers


@pytest.mark.parametrize("through_log", [True])
async def test_the_same_key_is_the_same_request(server: Server) -> None:
    first = await server.post("/v1/completions", {**COMPLETION, "n": 2}, headers=KEY)
    again = await server.post("/v1/completions", {**COMPLETION, "n": 2}, headers=KEY)
    assert first[0] == again[0] == 200
    assert (first[1]["id"], first[1]["choices"]) == (again[1]["id"], again[1]["choices"])
    assert first[1]["usage"] == again[1]["usage"]
    assert len(server.generator.seen) == 2
    assert all(request.keyed and len(request.digest) == 32 for request in server.generator.seen)
    assert (await server.post("/v1/completions", COMPLETION, headers={"Idempotency-Key": "order-2"}))[0] == 200
    assert len(server.generator.seen) == 3


@pytest.mark.parametrize("through_log", [True])
async def test_a_retry_may_stream_what_was_not_streamed(server: Server) -> None:
    whole = await server.post("/v1/completions", COMPLETION, headers=KEY)
    stream = {**COMPLETION, "stream": True}
    async with server.http.post(server.url + "/v1/completions", json=stream, headers=KEY) as response:
        *parts, done = [data for _, data in events(await response.read())]
    assert done == "[DONE]"
    assert "".join(part["choices"][0]["text"] for part in parts) == whole[1]["choices"][0]["text"] == TEXT
    assert len(server.generator.seen) == 1


@pytest.mark.parametrize("through_log", [True])
async def test_something_else_under_the_same_key(server: Server) -> None:
    await server.post("/v1/completions", COMPLETION, headers=KEY)
    for path, body in (("completions", {**COMPLETION, "prompt": "goodbye"}), ("chat/completions", CHAT)):
        status, reply, _ = await server.post(f"/v1/{path}", body, headers=KEY)
        error = shaped(reply)
        assert (status, error["code"], error["param"]) == (409, "idempotency_conflict", "idempotency-key")
    assert len(server.generator.seen) == 1


async def test_a_conflict_that_the_generator_finds(server: Server) -> None:
    server.generator.refusal = Conflict("another gateway has this key for another request")
    status, reply, _ = await server.post("/v1/completions", COMPLETION, headers=KEY)
    assert (status, shaped(reply)["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize("through_log", [True])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_keyed_request_outlives_its_client(server: Server, stream: bool) -> None:
    await server.generator.allow(3)
    body = {**COMPLETION, "stream": stream}
    post = asyncio.ensure_future(server.http.post(server.url + "/v1/completions", json=body, headers=KEY))
    await server.generator.until_active(1)
    if stream:
        (await post).close()
    else:
        post.cancel()
        await asyncio.wait([post])
    tasks = set(server.gateway._requests.tasks)
    if tasks:
        await asyncio.wait(tasks, timeout=DEADLINE_S)
    assert len(server.generator.active) == 1
    retry = asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=KEY))
    await server.generator.allow(None)
    assert (await retry)[1]["choices"][0]["text"] == TEXT
    assert len(server.generator.seen) == 1
    assert list(server.generator.outcomes.values()) == [FinishReason.STOP]


@pytest.mark.parametrize("through_log", [True])
async def test_two_at_once_are_one(server: Server) -> None:
    await server.generator.allow(2)
    both = [asyncio.ensure_future(server.post("/v1/completions", COMPLETION, headers=KEY)) for _ in range(2)]
    await server.generator.until_active(1)
    await server.generator.allow(None)
    replies = await asyncio.gather(*both)
    assert [json.dumps(reply[1]["choices"]) for reply in replies] == [json.dumps(replies[0][1]["choices"])] * 2
    assert len(server.generator.seen) == 1
