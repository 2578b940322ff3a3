"""Values that nobody means: refused by the field's name and in OpenAI's shape, or taken where they say something."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from greenroom.core.generation import SamplingParams
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import JSON, shaped

CHAT: dict[str, Any] = {"model": "org/small", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello"}
KINDS = [("chat/completions", ChatBody, CHAT), ("completions", CompletionBody, COMPLETION)]
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout")
WHOLE = ("n", "seed", "max_tokens", "top_k", "min_tokens", "priority")
NO_NUMBERS: list[Any] = ["1", True, [1], {"a": 1}, ""]
BIASES: list[Any] = [
    [], "x", 1, [[1, 2]], {"1": "2"}, {"1": None}, {"1": True}, {"1": [1]}, {"-1": 1}, {"+1": 1}, {" 1": 1},
    {"1.0": 1}, {"": 1}, {"1e1": 1}, {"\u0661": 1}, {"9" * 30: 1}, {"1": 100.5}, {"1": -1e300}, {"1": 10**400},
]  # fmt: skip


async def refused(server: Server, path: str, raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The error, after which nothing has begun."""
    body = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    async with server.http.post(f"{server.url}/v1/{path}", data=body, headers=JSON) as response:
        error = shaped(await response.json())
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert len(error["message"]) < 1000
    assert server.generator.seen == []
    return error


@pytest.mark.parametrize(("path", "kind", "body"), KINDS)
async def test_null_says_nothing(server: Server, path: str, kind: type[msgspec.Struct], body: dict[str, Any]) -> None:
    """In every field that may be left out, alone and in all of them at once."""
    optional = [field.name for field in msgspec.structs.fields(kind) if not field.required]
    await server.post(f"/v1/{path}", body)
    for fields in ([field] for field in optional):
        assert (await server.post(f"/v1/{path}", {**body, **dict.fromkeys(fields)}))[0] == 200, fields
    assert (await server.post(f"/v1/{path}", {**body, **dict.fromkeys(optional)}))[0] == 200
    wanted = {(request.prompt_ids, request.sampling) for request in server.generator.seen}
    assert len(wanted) == 1


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, _, body in KINDS])
@pytest.mark.parametrize("field", [*FLOATS, *WHOLE])
async def test_what_is_no_number_is_no_number(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    for value in NO_NUMBERS:
        error = await refused(server, path, {**body, field: value})
        assert (error["param"], error["code"]) == (field, "invalid_type")
    for raw in (b"NaN", b"Infinity", b"-Infinity", b"nan", b"0x1", b"01", b".5"):
        error = await refused(server, path, json.dumps(body)[:-1].encode() + b', "%b": %b}' % (field.encode(), raw))
        assert error["code"] == "invalid_json"
    for huge in (b"1e999", b"-1e999", b"1" + b"0" * 400, b"1" + b"0" * 5000):
        error = await refused(server, path, json.dumps(body)[:-1].encode() + b', "%b": %b}' % (field.encode(), huge))
        assert error["param"] in (field, None)


@pytest.mark.parametrize("bias", BIASES, ids=lambda bias: json.dumps(bias)[:20])
async def test_biases_that_are_none(server: Server, bias: Any) -> None:
    error = await refused(server, "completions", {**COMPLETION, "logit_bias": bias})
    assert error["param"].startswith("logit_bias")


async def test_a_huge_token_id_is_not_told_in_full(server: Server) -> None:
    for raw in (b"1" + b"0" * 400, b"1" + b"0" * 5000, b"-" + b"9" * 4000):
        for prompt in (b"[%b]", b"[[7], [%b]]", b"[7, %b]"):
            body = b'{"model": "org/small", "echo": true, "prompt": ' + prompt % raw + b"}"
            error = await refused(server, "completions", body)
            assert (error["param"] or "prompt").startswith("prompt")


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": -0.0, "top_p": 1, "seed": -0}, {"temperature": 0.0, "top_p": 1.0, "seed": 0}),
    ({"top_p": -0.0}, {"top_p": 0.0}),
    ({"temperature": 5e-324, "min_p": 1}, {"temperature": 5e-324, "min_p": 1.0}),
    ({"presence_penalty": -0.0, "frequency_penalty": 2}, {"presence_penalty": 0.0, "frequency_penalty": 2.0}),
    ({"max_tokens": 4, "min_tokens": 4, "stop": "x"}, {"max_tokens": 4, "min_tokens": 4, "stop": ("x",)}),
    ({"seed": 2**63 - 1, "top_k": 2**63 - 1}, {"seed": 2**63 - 1, "top_k": 2**63 - 1}),
    ({"seed": -(2**63), "stop": []}, {"seed": -(2**63), "stop": ()}),
    ({"logit_bias": {}, "stop_token_ids": []}, {"logit_bias": (), "stop_token_ids": ()}),
    ({"logit_bias": {"0011": 1, "7": -0.0}}, {"logit_bias": ((7, 0.0), (11, 1.0))}),
    ({"repetition_penalty": 1e-300}, {"repetition_penalty": 1e-300}),
    ({"stop": ["\u0000", "\U0001f680", "é"]}, {"stop": ("\u0000", "\U0001f680", "é")}),
]


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, _, body in KINDS])
@pytest.mark.parametrize(("fields", "wanted"), TAKEN)
async def test_odd_values_that_say_something(
    server: Server, path: str, body: dict[str, Any], fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    status, reply, _ = await server.post(f"/v1/{path}", {**body, **fields})
    assert status == 200, reply
    said = asdict(server.generator.seen[0].sampling)
    assert {name: said[name] for name in wanted} == wanted
    assert server.generator.seen[0].sampling == SamplingParams(**said)


async def test_a_client_is_told_that_its_own_changes_leave_no_token(server: Server) -> None:
    """Nothing of it has come by then, so in a stream too it is the status."""
    server.generator.fail_at, server.generator.at_fault = 0, True
    for path, _, body in KINDS:
        for stream in (False, True):
            status, reply, _ = await server.post(f"/v1/{path}", {**body, "stream": stream, "min_tokens": 1})
            assert (status, shaped(reply)["code"]) == (400, "invalid_value")
