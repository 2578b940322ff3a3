"""/tokenize, /detokenize and /version, as vLLM's clients call them."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.pipeline.gateway.conftest import Server

MODEL = "org/small"
TEXT = "Hello there, naïve café 🚀"


async def test_a_text(server: Server) -> None:
    tokenizer = server.text.tokenizer
    for fields, special in (({}, True), ({"add_special_tokens": False, "model": MODEL}, False)):
        status, reply, _ = await server.post("/tokenize", {"prompt": TEXT, **fields})
        ids = tokenizer.encode(TEXT, add_special_tokens=special)
        assert (status, reply) == (
            200,
            {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None},
        )
    assert not server.generator.seen


async def test_a_chat_has_the_tokens_that_its_answer_is_made_from(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello world"}]
    _, reply, _ = await server.post("/tokenize", {"messages": messages, "model": MODEL})
    await server.post("/v1/chat/completions", {"messages": messages, "model": MODEL, "max_tokens": 1})
    assert tuple(reply["tokens"]) == server.generator.seen[0].prompt_ids
    _, shorter, _ = await server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert shorter["tokens"] == reply["tokens"][: shorter["count"]]
    assert shorter["count"] < reply["count"]


async def test_tokens_as_the_vocabulary_writes_them(server: Server) -> None:
    _, reply, _ = await server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert len(reply["token_strs"]) == reply["count"]
    backend = server.text.tokenizer._backend
    assert reply["token_strs"] == [backend.id_to_token(token_id) for token_id in reply["tokens"]]


async def test_there_and_back(server: Server) -> None:
    _, reply, _ = await server.post("/tokenize", {"prompt": f"<|im_start|>{TEXT}", "add_special_tokens": False})
    status, back, _ = await server.post("/detokenize", {"tokens": reply["tokens"], "model": MODEL})
    assert (status, back) == (200, {"prompt": f"<|im_start|>{TEXT}"})
    assert (await server.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


async def test_the_version(server: Server) -> None:
    async with server.http.get(f"{server.url}/version") as response:
        assert await response.json() == {"version": importlib.metadata.version("greenroom")}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_field"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt", "missing_field"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "x", "colour": 1}, 400, "colour", "unknown_field"),
        ("/tokenize", {"prompt": "x", "tools": []}, 400, "tools", "invalid_value"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        ("/tokenize", {"messages": []}, 400, "messages", "invalid_value"),
        ("/detokenize", {}, 400, "tokens", "missing_field"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]", "invalid_type"),
    ],
)
async def test_what_is_wrong_is_named(
    server: Server, path: str, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    found, reply, _ = await server.post(path, body)
    assert (found, reply["error"]["param"], reply["error"]["code"]) == (status, param, code)
