"""Whatever is wrong with a request: OpenAI's error object with the right status, and nothing changed by it."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from greenroom.core.errors import InvalidRequest, Saturated, TransferFailed
from greenroom.fabric.log import AppendUnknown, LogError, LogFailed, LogUnavailable
from tests.pipeline.gateway.conftest import Server
from tests.scripted_generator import DEADLINE_S

CHAT: dict[str, Any] = {"model": "org/small", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello"}
JSON = {"Content-Type": "application/json"}


def shaped(body: Any) -> dict[str, Any]:
    """The error of a body in OpenAI's shape."""
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert isinstance(error["code"], str)
    return error


@pytest.mark.parametrize("kind", [LogFailed, LogUnavailable, AppendUnknown])
async def test_no_broker_and_no_topic_is_named(
    server: Server, caplog: pytest.LogCaptureFixture, kind: type[LogError]
) -> None:
    server.generator.refusal = kind("greenroom.requests did not answer: kafka-1.internal:9092")
    status, body, headers = await server.post("/v1/completions", COMPLETION)
    error = shaped(body)
    assert (status, error["code"], headers["Retry-After"]) == (503, "not_sent", "1")
    assert "requests" not in error["message"]
    assert "kafka" not in error["message"]
    assert "kafka-1.internal:9092" in caplog.text


def nested(depth: int) -> bytes:
    return b'{"model":"org/small","messages":[],"audio":' + b"[" * depth + b"]" * depth + b"}"


TABLE: list[tuple[str, bytes | dict[str, Any], str | None, str, str]] = [
    # path, body, param, code, a part of the message
    ("chat/completions", b"", None, "invalid_json", "not valid JSON"),
    ("chat/completions", b"{", None, "invalid_json", "not valid JSON"),
    ("chat/completions", b'{"model": NaN}', None, "invalid_json", "not valid JSON"),
    ("chat/completions", b"\xff\xfe", None, "invalid_json", "not valid JSON"),
    ("chat/completions", b'{"model":"\xff","messages":[]}', None, "invalid_json", "not valid JSON"),
    ("chat/completions", b"[]", None, "invalid_type", "expected `object`"),
    ("chat/completions", b"null", None, "invalid_type", "expected `object`"),
    ("chat/completions", nested(100_000), None, "invalid_json", "nested too deeply"),
    ("chat/completions", {}, "model", "missing_field", "model is missing"),
    ("chat/completions", {"model": "org/small"}, "messages", "missing_field", "messages is missing"),
    ("chat/completions", {**CHAT, "model": 3}, "model", "invalid_type", "expected `str`"),
    ("chat/completions", {**CHAT, "messages": []}, "messages", "invalid_value", "empty"),
    ("chat/completions", {**CHAT, "messages": "hi"}, "messages", "invalid_type", "expected `array`"),
    ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, "messages[0].role", "missing_field", "missing"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content", "missing_field", "missing"),
    ("chat/completions", {**CHAT, "messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value",
     "'king' is not a role; known: system, developer, user, assistant"),
    ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
     "messages[0].role", "unsupported_field", "tools are not supported"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour",
     "unknown_field", "messages[0].colour"),
    ("chat/completions", {**CHAT, "messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls", "unsupported_field", "tool_calls is not supported"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "name": "Ann", "content": "x"}]}, "messages[0].name",
     "unsupported_field", "does not use it"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].type", "unsupported_field", "'image_url' are not supported"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
     "messages[0].content[0].b", "unknown_field", "unknown field"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "invalid_type", "expected a string"),
    ("chat/completions", {**CHAT, "colour": 1, "shape": 2}, "colour", "unknown_field", "colour, shape"),
    ("chat/completions", {**CHAT, "prompt": "x"}, "prompt", "unknown_field", "prompt"),
    ("completions", {**COMPLETION, "messages": []}, "messages", "unknown_field", "messages"),
    ("chat/completions", {**CHAT, "temperature": 2.5}, "temperature", "invalid_value", "from 0 to 2"),
    ("chat/completions", {**CHAT, "temperature": -1}, "temperature", "invalid_value", "from 0 to 2"),
    ("chat/completions", {**CHAT, "temperature": "hot"}, "temperature", "invalid_type", "expected `float"),
    ("chat/completions", b'{"model":"org/small","messages":[],"temperature":1e999}', "temperature", "invalid_type",
     "out of range"),
    ("chat/completions", {**CHAT, "top_p": -0.1}, "top_p", "invalid_value", "from 0 to 1"),
    ("chat/completions", {**CHAT, "min_p": 1.5}, "min_p", "invalid_value", "from 0 to 1"),
    ("chat/completions", {**CHAT, "presence_penalty": 3}, "presence_penalty", "invalid_value", "from -2 to 2"),
    ("chat/completions", {**CHAT, "frequency_penalty": "x"}, "frequency_penalty", "invalid_type", "float"),
    ("completions", {**COMPLETION, "repetition_penalty": 0}, "repetition_penalty", "invalid_value", "above 0"),
    ("completions", {**COMPLETION, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "'x'"),
    ("completions", {**COMPLETION, "logit_bias": {"999999": 1}}, "logit_bias", "invalid_value", "999999"),
    ("completions", {**COMPLETION, "logit_bias": {"1": 101}}, "logit_bias", "invalid_value", "-100 to 100"),
    ("completions", {**COMPLETION, "logit_bias": {"1": 1, "01": 1}}, "logit_bias", "invalid_value", "each once"),
    ("completions", {**COMPLETION, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value", "at most"),
    ("completions", {**COMPLETION, "max_tokens": -1}, "max_tokens", "invalid_value", "at least 0"),
    ("completions", {**COMPLETION, "echo": True, "logprobs": 21}, "logprobs", "invalid_value", "from 0 to 20"),
    ("chat/completions", {**CHAT, "top_k": -2}, "top_k", "invalid_value", "0 (off) or more"),
    ("chat/completions", {**CHAT, "n": 0}, "n", "invalid_value", "at least 1"),
    ("chat/completions", {**CHAT, "n": 129}, "n", "invalid_value", "at most 128"),
    ("chat/completions", {**CHAT, "n": 1.5}, "n", "invalid_type", "expected `int"),
    ("chat/completions", {**CHAT, "n": True}, "n", "invalid_type", "got `bool`"),
    ("chat/completions", {**CHAT, "seed": 2**63}, "seed", "invalid_type", "<="),
    ("chat/completions", {**CHAT, "seed": "x"}, "seed", "invalid_type", "expected `int"),
    ("chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens", "invalid_value", "at least 0"),
    ("chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens", "invalid_value", "at least"),
    ("chat/completions", {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value",
     "differ"),
    ("chat/completions", {**CHAT, "max_tokens": 250}, "max_tokens", "context_length_exceeded",
     "maximum context length is 256 tokens"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "é " * 300}]}, "messages",
     "context_length_exceeded", "shorten the messages"),
    ("completions", {**COMPLETION, "prompt": [7] * 256}, "prompt", "context_length_exceeded", "256 in the prompt"),
    ("completions", {**COMPLETION, "max_tokens": 10**18}, "max_tokens", "context_length_exceeded", "lower max_tokens"),
    ("chat/completions", {**CHAT, "stop": ""}, "stop", "invalid_value", "none of them empty"),
    ("chat/completions", {**CHAT, "stop": ["a"] * 17}, "stop", "invalid_value", "at most 16"),
    ("chat/completions", {**CHAT, "stop": [1]}, "stop[0]", "invalid_type", "expected `str`"),
    ("chat/completions", {**CHAT, "stop_token_ids": [10**9]}, "stop_token_ids", "invalid_value", "ids from 0 to"),
    ("chat/completions", {**CHAT, "logprobs": 3}, "logprobs", "invalid_type", "expected `bool"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs", "invalid_value", "needs logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "0 to 20"),
    ("completions", {**COMPLETION, "logprobs": 21}, "logprobs", "invalid_value", "from 0 to 20"),
    ("completions", {**COMPLETION, "logprobs": True}, "logprobs", "invalid_type", "expected `int"),
    ("chat/completions", {**CHAT, "stream_options": {}}, "stream_options", "invalid_value", "stream: true only"),
    ("chat/completions", {**CHAT, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field",
     "stream_options.x"),
    ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "unsupported_field", "include_obfuscation is not supported"),
    ("chat/completions", {**CHAT, "task_type": ""}, "task_type", "invalid_value", "1 to 64"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "invalid_value",
     "no such variable; known: none"),
    ("chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort", "unsupported_field",
     "does not use it"),
    ("chat/completions", {**CHAT, "continue_final_message": True}, "continue_final_message", "invalid_value",
     "final message of the assistant"),
    ("chat/completions", {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt", "invalid_value", "can not both"),
    ("completions", {"model": "org/small"}, "prompt", "missing_field", "prompt is missing"),
    ("completions", {**COMPLETION, "prompt": None}, "prompt", "invalid_type", "got `null`"),
    ("completions", {**COMPLETION, "prompt": ""}, "prompt", "invalid_value", "empty"),
    ("completions", {**COMPLETION, "prompt": []}, "prompt", "invalid_value", "not empty"),
    ("completions", {**COMPLETION, "prompt": [[]]}, "prompt", "invalid_value", "no tokens"),
    ("completions", {**COMPLETION, "prompt": [1, "a"]}, "prompt", "invalid_value", "must be a string"),
    ("completions", {**COMPLETION, "prompt": [10**12]}, "prompt", "invalid_value", "the model's are 0 to"),
    ("completions", {**COMPLETION, "prompt": [-1]}, "prompt", "invalid_value", "the model's are 0 to"),
    ("completions", {**COMPLETION, "prompt": [[1], ["a"]]}, "prompt[1][0]", "invalid_type", "expected `int`"),
    ("completions", {**COMPLETION, "prompt": ["a"] * 129}, "prompt", "invalid_value", "at most 128"),
    ("completions", {**COMPLETION, "prompt": ["a"] * 65, "n": 2}, "n", "invalid_value", "at most 128"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "code", "message"), TABLE)
async def test_bad_request(
    server: Server, path: str, body: bytes | dict[str, Any], param: str | None, code: str, message: str
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with server.http.post(f"{server.url}/v1/{path}", data=raw, headers=JSON) as response:
        error = shaped(await response.json())
        assert response.headers["X-Request-Id"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]
    assert server.generator.seen == []
    assert server.metric("http_errors_total", code=code) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_another_model(server: Server, path: str) -> None:
    body = {**(CHAT if path.startswith("chat") else COMPLETION), "model": "gpt-6-astra"}
    status, reply, _ = await server.post(f"/v1/{path}", body)
    error = shaped(reply)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "served: org/small" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/", 404, "unknown_path", None),
        ("POST", "/v1/embeddings", 404, "unknown_path", None),
        ("POST", "/v1/chat/completions/", 404, "unknown_path", None),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed", "POST"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed", "POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET,HEAD"),
        ("POST", "/health", 405, "method_not_allowed", "GET,HEAD"),
        ("GET", "/v1/models/none", 404, "model_not_found", None),
    ],
)
async def test_paths_and_methods(
    server: Server, method: str, path: str, status: int, code: str, allow: str | None
) -> None:
    async with server.http.request(method, server.url + path, json=CHAT if method == "POST" else None) as response:
        assert (response.status, shaped(await response.json())["code"]) == (status, code)
        assert response.headers.get("Allow") == allow


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "multipart/form-data"},
        {"Content-Type": ""},
    ],
)
async def test_a_body_must_say_that_it_is_json(server: Server, headers: dict[str, str]) -> None:
    async with server.http.post(
        server.url + "/v1/completions", data=json.dumps(COMPLETION).encode(), headers=headers
    ) as response:
        assert response.status == 415
        assert shaped(await response.json())["code"] == "unsupported_media_type"


@pytest.mark.parametrize("config", [{"max_body_bytes": 1000}])
@pytest.mark.parametrize("form", ["length", "chunked", "gzip"])
async def test_a_body_too_large(server: Server, form: str) -> None:
    raw = json.dumps({**COMPLETION, "prompt": "x" * 5000}).encode()
    headers = dict(JSON)

    async def chunks() -> Any:
        for at in range(0, len(raw), 500):
            yield raw[at : at + 500]

    data: Any = raw
    if form == "chunked":
        data = chunks()
    elif form == "gzip":
        data, headers["Content-Encoding"] = gzip.compress(raw), "gzip"
    async with server.http.post(server.url + "/v1/completions", data=data, headers=headers) as response:
        assert response.status == 413
        error = shaped(await response.json())
    assert (error["code"], "1000 bytes" in error["message"]) == ("body_too_large", True)
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: 99999999\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert b" 413 " in head.split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("coding", "raw", "status", "code"),
    [
        ("gzip", b"not gzip at all", 400, "invalid_body"),
        ("gzip", gzip.compress(json.dumps(COMPLETION).encode(), mtime=0)[:-8], 400, "invalid_body"),
        ("br", b"any", 415, "unsupported_content_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), 415, "unsupported_content_encoding"),
    ],
)
async def test_a_body_that_is_not_what_its_encoding_says_or_in_one_that_is_not_taken(
    server: Server, coding: str, raw: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {**JSON, "Content-Encoding": coding}
    async with server.http.post(server.url + "/v1/completions", data=raw, headers=headers) as response:
        error = shaped(await response.json())
        assert (response.status, error["code"], error["param"]) == (status, code, "content-encoding")
        assert response.headers["X-Request-Id"]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_model_of_text_is_ready_for_no_inference(server: Server) -> None:
    """What asks whether it may send one is told what infer would say."""
    url = f"{server.url}/v2/models/{server.generator.model.name}"
    async with server.http.get(f"{url}/ready") as ready, server.http.post(f"{url}/infer", json={}) as infer:
        assert ready.status == infer.status == 400
        assert await ready.json() == await infer.json()
        assert "generates text" in (await ready.json())["error"]


@pytest.mark.parametrize("config", [{"body_timeout_s": 0.1}])
async def test_a_body_that_does_not_come(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9\r\n\r\n{"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert b" 408 " in head.split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (Saturated("the queue is full: 64 requests wait", retry_after_s=0.2), 429, "saturated"),
        (InvalidRequest("no KV for so long a prompt", param="prompt", code="too_long"), 400, "too_long"),
        (TransferFailed("expert 3 of layer 2 did not arrive"), 500, "generation_failed"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_generator_refuses(
    server: Server, refusal: Exception, status: int, code: str, stream: bool
) -> None:
    server.generator.refusal = refusal
    answered, reply, headers = await server.post("/v1/completions", {**COMPLETION, "stream": stream})
    error = shaped(reply)
    assert (answered, error["code"]) == (status, code)
    assert (headers.get("Retry-After") is not None) == (status == 429)
    assert ("secret" in error["message"]) is False
    assert (str(refusal) in error["message"]) is not isinstance(refusal, RuntimeError)
    server.generator.refusal = None
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


@pytest.mark.parametrize(
    ("attribute", "status", "code"),
    [
        ("fail_at", 500, "generation_failed"),
        ("raise_at", 500, "internal_error"),
        ("cancel_at", 503, "cancelled"),
        ("vanish_at", 500, "generation_failed"),
    ],
)
async def test_failures_of_a_reply_that_is_not_streamed(server: Server, attribute: str, status: int, code: str) -> None:
    setattr(server.generator, attribute, 2)
    answered, reply, _ = await server.post("/v1/completions", {**COMPLETION, "n": 2})
    assert (answered, shaped(reply)["code"]) == (status, code)
    await server.generator.until_idle()


async def test_missing_logprobs_fail_and_are_not_made_up(server: Server) -> None:
    server.generator.gives_logprobs = False
    status, reply, _ = await server.post("/v1/completions", {**COMPLETION, "logprobs": 1})
    assert (status, shaped(reply)["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("config", [{"max_in_flight": 2}])
async def test_more_at_once_than_allowed(server: Server) -> None:
    await server.generator.allow(0)
    running = [asyncio.ensure_future(server.post("/v1/completions", COMPLETION)) for _ in range(2)]
    await server.generator.until_active(2)
    status, reply, headers = await server.post("/v1/completions", COMPLETION)
    assert (status, shaped(reply)["code"], headers["Retry-After"]) == (429, "saturated", "1")
    await server.generator.allow(None)
    assert [done[0] for done in await asyncio.gather(*running)] == [200, 200]
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


async def test_request_ids(server: Server) -> None:
    given = await server.post("/v1/completions", COMPLETION, headers={"X-Request-Id": "mine-1"})
    assert given[2]["X-Request-Id"] == "mine-1"
    async with server.http.get(server.url + "/live") as response:
        assert response.headers["X-Request-Id"].startswith("req-")
    for bad in ("a b", "", "x" * 129):
        status, reply, headers = await server.post("/v1/completions", COMPLETION, headers={"X-Request-Id": bad})
        assert (status, shaped(reply)["code"]) == (400, "invalid_request_id")
        assert headers["X-Request-Id"].startswith("req-")
