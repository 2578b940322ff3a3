"""A thousand malformed bodies, and the server still serves."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections.abc import Callable
from typing import Any

from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import shaped

CHAT: dict[str, Any] = {
    "model": "org/small",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["x"],
    "stream": False,
    "n": 1,
}
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": ["hello", "there"], "max_tokens": 4, "seed": 1}
Mutation = Callable[[random.Random, dict[str, Any]], bytes]


def junk(draw: random.Random, depth: int = 3) -> Any:
    """Any JSON value, odd ones often."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.random() < 0.5,
        lambda: draw.choice([-1, 0, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400]),
        lambda: draw.choice([-0.0, 1e308, -1e-308, 0.1]),
        lambda: draw.choice(["", "\x00", "\ud800", "a" * 3000, "日本語\u202e", "{{ 7*7 }}", "<|im_end|>", "null"]),
        lambda: [junk(draw, depth - 1) for _ in range(draw.randrange(4))] if depth else [],
        lambda: {draw.choice(["", "a", "type", "role"]): junk(draw, depth - 1)} if depth else {},
    ]
    return draw.choice(kinds)()


def with_an_unknown_field(draw: random.Random, body: dict[str, Any]) -> bytes:
    return json.dumps({**body, draw.choice(["x", "", "Model", "prompt ", "\n"]): junk(draw)}).encode()


def with_a_wrong_value(draw: random.Random, body: dict[str, Any]) -> bytes:
    field = draw.choice(sorted(body))
    wrong: Any = draw.choice([{"a": 1}, [[[]]], {"role": []}, [None], [{}]])
    return json.dumps({**body, field: wrong}).encode()


def without_a_needed_field(draw: random.Random, body: dict[str, Any]) -> bytes:
    needed = draw.choice([field for field in ("model", "messages", "prompt") if field in body])
    return json.dumps({field: value for field, value in body.items() if field != needed}).encode()


def cut_short(draw: random.Random, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return raw[: draw.randrange(len(raw) - 1)]


def with_flipped_brackets(draw: random.Random, body: dict[str, Any]) -> bytes:
    raw = bytearray(json.dumps(body).encode())
    places = [place for place, byte in enumerate(raw) if byte in b'{}[]":,']
    raw[draw.choice(places)] = draw.choice(b"\x00\x01\xff\xc3\x80<")
    return bytes(raw)


def random_bytes(draw: random.Random, body: dict[str, Any]) -> bytes:
    return draw.randbytes(draw.randrange(200)) + b"\xff"


def nested_deeply(draw: random.Random, body: dict[str, Any]) -> bytes:
    depth = draw.choice([100, 5000, 200_000])
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
    value = opening * depth + ("" if opening == "[" else "1") + closing * draw.choice([depth, depth - 1, 0])
    return json.dumps(body)[:-1].encode() + f', "{draw.choice(["tools", "stop", "x"])}": {value}}}'.encode()


def with_a_huge_number(draw: random.Random, body: dict[str, Any]) -> bytes:
    field = draw.choice(["max_tokens", "n", "seed", "temperature", "top_p", "top_k", "stop_token_ids"])
    number = draw.choice(["9" * 30, "9" * 5000, "-" + "9" * 400, "1e999", "1e5", "NaN", "Infinity", "0x10", "01"])
    return json.dumps({**body, field: "HERE"}).encode().replace(b'"HERE"', number.encode())


def with_bad_text(draw: random.Random, body: dict[str, Any]) -> bytes:
    bad = draw.choice([b"\\ud800", b"\\udc00x", b"\\q", b"\xed\xa0\x80", b"\xff", b"\n", b"\\u12"])
    return json.dumps(body).encode().replace(b"hello", bad)


MUTATIONS: list[Mutation] = [
    with_an_unknown_field,
    with_a_wrong_value,
    without_a_needed_field,
    cut_short,
    with_flipped_brackets,
    random_bytes,
    nested_deeply,
    with_a_huge_number,
    with_bad_text,
]


async def _post(server: Server, path: str, raw: bytes) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    async with server.http.post(server.url + path, data=io.BytesIO(raw), headers=headers) as response:
        return response.status, await response.json()


async def test_a_thousand_malformed_bodies(server: Server) -> None:
    """Every one is answered 4xx in OpenAI's shape, none reaches the generator."""
    draw = random.Random(20240607)
    seen: set[tuple[int, str]] = set()
    for number in range(1000):
        path, body = draw.choice([("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
        mutation = MUTATIONS[number % len(MUTATIONS)]
        raw = mutation(draw, body)
        status, reply = await _post(server, path, raw)
        error = shaped(reply)
        assert 400 <= status < 500, (mutation.__name__, raw[:300], error)
        seen.add((status, error["code"]))
    assert server.generator.seen == []
    assert {code for _, code in seen} >= {"invalid_json", "invalid_type", "unknown_field", "missing_field"}
    assert (await _post(server, "/v1/chat/completions", json.dumps(CHAT).encode()))[0] == 200
    assert (await _post(server, "/v1/completions", json.dumps(COMPLETION).encode()))[0] == 200
    assert server.metric("http_errors_total", code="invalid_type") > 0


async def test_any_values_in_any_fields_never_break_it(server: Server) -> None:
    """Odd but perhaps valid: a reply or a 4xx, never a 5xx."""
    draw = random.Random(11)
    fields = ["max_tokens", "temperature", "top_p", "n", "seed", "stop", "logprobs", "stream_options", "user", "tools",
              "top_k", "stop_token_ids", "task_type", "model", "messages", "prompt", "logit_bias", "best_of", "echo",
              "chat_template_kwargs", "response_format", "ignore_eos"]  # fmt: skip
    statuses = set()
    for _ in range(400):
        path, body = draw.choice([("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
        raw = json.dumps({**body, **{draw.choice(fields): junk(draw) for _ in range(draw.randrange(1, 3))}}).encode()
        status, reply = await _post(server, path, raw)
        assert status < 500, (raw, reply)
        statuses.add(status)
        if status != 200:
            shaped(reply)
    assert statuses >= {200, 400, 404}


async def test_broken_http_leaves_it_serving(server: Server) -> None:
    draw = random.Random(5)
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        kind = draw.randrange(3)
        if kind == 0:
            writer.write(draw.randbytes(draw.randrange(1, 300)) + b"\r\n\r\n")
        elif kind == 1:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        else:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n")
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert (await _post(server, "/v1/completions", json.dumps(COMPLETION).encode()))[0] == 200
