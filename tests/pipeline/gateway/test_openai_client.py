"""The openai package, which we did not write, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from greenroom.core.generation import FinishReason
from tests.pipeline.gateway.conftest import Server
from tests.scripted_generator import DEADLINE_S, TEXT

MODEL = "org/small"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def in_thread(server: Server, use: Callable[[OpenAI], Any]) -> Any:
    """The synchronous client beside the server's event loop."""

    def run() -> Any:
        with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_chat(client: AsyncOpenAI, server: Server) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    [request] = server.generator.seen
    assert list(request.prompt_ids) == server.text.tokenizer.encode(prompt, add_special_tokens=False)
    generated = len(server.text.tokenizer.encode(TEXT, add_special_tokens=False)) + 1  # and EOS
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(request.prompt_ids), generated)
    assert reply.usage.total_tokens == len(request.prompt_ids) + generated
    assert (reply.object, reply.model, reply.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert reply.system_fingerprint
    assert reply._request_id
    assert request.sampling.max_tokens == server.generator.model.max_model_len - len(request.prompt_ids)


async def test_chat_streamed(client: AsyncOpenAI, server: Server) -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    ]
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == TEXT
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "stop"]
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(server.text.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert "\ufffd" not in "".join(part.choices[0].delta.content or "" for part in parts)


async def test_synchronous_client(server: Server) -> None:
    def use(client: OpenAI) -> tuple[str | None, str, str, list[str]]:
        chat = client.chat.completions.create(model=MODEL, messages=HELLO)
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        completion = client.completions.create(model=MODEL, prompt="hello", max_tokens=4)
        models = [model.id for model in client.models.list()]
        return chat.choices[0].message.content, streamed, completion.choices[0].text, models

    whole, streamed, completion, models = await in_thread(server, use)
    assert whole == streamed == TEXT
    assert TEXT.startswith(completion)
    assert models == [MODEL]


async def test_a_model_by_its_name(client: AsyncOpenAI) -> None:
    model = await client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by, model.created) == (MODEL, "model", "greenroom", 1_700_000_000)
    with pytest.raises(openai.NotFoundError, match=r"'org/other' does not exist here; served: org/small"):
        await client.models.retrieve("org/other")


async def test_stop_and_length(client: AsyncOpenAI) -> None:
    stopped = await client.chat.completions.create(model=MODEL, messages=HELLO, stop=["fox", "STOP"])
    assert stopped.choices[0].message.content == TEXT[: TEXT.index("fox")]
    assert stopped.choices[0].finish_reason == "stop"
    short = await client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("checks", [True, False])
async def test_a_stop_string_ends_it_whether_or_not_the_generator_looks(
    client: AsyncOpenAI, server: Server, stream: bool, checks: bool
) -> None:
    server.generator.checks_stops = checks
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": "hello",
        "stop": "STOP h",
        "max_tokens": 100,
        "stream": stream,
    }
    if stream:
        parts = [part async for part in await client.completions.create(**arguments)]
        text, finish = "".join(part.choices[0].text for part in parts), parts[-1].choices[0].finish_reason
    else:
        reply = await client.completions.create(**arguments)
        text, finish = reply.choices[0].text, reply.choices[0].finish_reason
    assert (text, finish) == (TEXT[: TEXT.index("STOP h")], "stop")
    await server.generator.until_idle()
    expected = FinishReason.STOP if checks else FinishReason.CANCELLED
    assert list(server.generator.outcomes.values()) == [expected]


async def test_extensions_reach_the_generator(client: AsyncOpenAI, server: Server) -> None:
    word = server.text.tokenizer.encode(TEXT, add_special_tokens=False)[4]
    extra = {"top_k": 7, "ignore_eos": True, "stop_token_ids": [word], "task_type": "summarise"}
    reply = await client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0.5, top_p=0.25, seed=-3, extra_body=extra
    )
    [request] = server.generator.seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, -3)
    assert (sampling.ignore_eos, sampling.stop_token_ids, request.task_type) == (True, (word,), "summarise")
    assert reply.usage is not None
    said = server.generator._text_of(request)[: reply.usage.completion_tokens]
    assert said[-1] == word  # counted, but its text is left out
    assert reply.choices[0].message.content == server.text.tokenizer.decode(said[:-1])
    assert reply.choices[0].finish_reason == "stop"


async def test_the_stop_string_is_kept_on_demand(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(
        model=MODEL, prompt="x", stop="fox", extra_body={"include_stop_str_in_output": True}
    )
    assert reply.choices[0].text == TEXT[: TEXT.index("fox") + 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_of_one_prompt(client: AsyncOpenAI, server: Server, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 5, "stream": stream}
    texts = ["", "", ""]
    if stream:
        async for part in await client.chat.completions.create(**arguments):
            texts[part.choices[0].index] += part.choices[0].delta.content or ""
    else:
        reply = await client.chat.completions.create(**arguments)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        texts = [choice.message.content or "" for choice in reply.choices]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(server.generator.seen[0].prompt_ids)
    seeds = [request.sampling.seed for request in server.generator.seen]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert len({request.request_id for request in server.generator.seen}) == 3
    expected = [server.text.tokenizer.decode(server.generator._text_of(seen)) for seen in server.generator.seen]
    assert texts == expected


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_what_was_approximated_stands_beside_the_usage(client: AsyncOpenAI, server: Server, kind: str) -> None:
    """Of two choices of one length it is the mean; in a stream it comes with the usage, and never without."""
    server.generator.approximates = lambda request: 0.5 if request.sampling.seed == 5 else 0.25
    shared: dict[str, Any] = {"model": MODEL, "n": 2, "seed": 5, "max_tokens": 4, "stop": []}
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    shared |= {"messages": HELLO} if kind == "chat" else {"prompt": "hello"}
    reply = await create(**shared)
    assert reply.model_extra == {"approximated": 0.375}
    assert reply.usage.model_extra == {}, "clients add up what they find in it"
    stream = await create(**shared, stream=True, stream_options={"include_usage": True})
    *parts, last = [part async for part in stream]
    assert last.model_extra == {"approximated": 0.375}
    assert all("approximated" not in part.model_extra for part in parts)
    plain = [part async for part in await create(**shared, stream=True)]
    assert all("approximated" not in part.model_extra for part in plain)
    assert server.metric("approximated_tokens_total") == pytest.approx(
        sum((len(request.prompt_ids) + 3) * server.generator.approximates(request) for request in server.generator.seen)
    )


async def test_every_form_of_prompt(client: AsyncOpenAI, server: Server) -> None:
    ids = server.text.tokenizer.encode("hello there", add_special_tokens=True)
    forms: list[tuple[Any, int]] = [("hello there", 1), (["hello there", "the"], 2), (ids, 1), ([ids, ids[:1]], 2)]
    for prompt, count in forms:
        server.generator.seen.clear()
        reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=2)
        assert [choice.index for choice in reply.choices] == list(range(2 * count))
        assert [list(request.prompt_ids) for request in server.generator.seen[:2]] == [ids, ids]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == sum(len(request.prompt_ids) for request in server.generator.seen[::2])
        assert reply.usage.completion_tokens == 4 * count


async def test_chat_logprobs(client: AsyncOpenAI, server: Server) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert reply.usage is not None
    assert len(logprobs.content) == reply.usage.completion_tokens
    *said, last = logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in said).decode() == TEXT
    assert last.token == "<|im_end|>"
    assert any(token.token.startswith("bytes:\\x") for token in said)  # parts of characters
    for place, token in enumerate(logprobs.content):
        assert token.logprob == -0.25 - place
        assert [top.logprob for top in token.top_logprobs] == [-0.25 - place, -1.25 - place]
        assert (token.top_logprobs[0].token, token.top_logprobs[0].bytes) == (token.token, token.bytes)


async def test_logprobs_streamed_are_those_of_the_whole(client: AsyncOpenAI) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 1, "stop": "fox"}
    whole = await client.chat.completions.create(**chat)
    streamed = [part async for part in await client.chat.completions.create(**chat, stream=True)]
    assert whole.choices[0].logprobs is not None
    joined = [token for part in streamed for token in getattr(part.choices[0].logprobs, "content", None) or []]
    assert joined == whole.choices[0].logprobs.content
    plain: dict[str, Any] = {"model": MODEL, "prompt": "hello", "logprobs": 3, "stop": "fox"}
    completion = await client.completions.create(**plain)
    parts = [part async for part in await client.completions.create(**plain, stream=True)]
    expected = completion.choices[0].logprobs
    assert expected is not None
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined_field = [
            item for part in parts if part.choices[0].logprobs for item in getattr(part.choices[0].logprobs, field)
        ]
        assert joined_field == getattr(expected, field)


async def test_completion_logprobs(client: AsyncOpenAI, server: Server) -> None:
    reply = await client.completions.create(model=MODEL, prompt="hello", logprobs=0, max_tokens=9)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    ids = server.text.tokenizer.encode(TEXT, add_special_tokens=False)[:9]
    assert logprobs.tokens == [server.text.tokenizer.token_bytes(token_id).decode() for token_id in ids]
    assert logprobs.token_logprobs == [-0.25 - place for place in range(9)]
    assert logprobs.top_logprobs == [{token: -0.25 - place} for place, token in enumerate(logprobs.tokens)]
    assert logprobs.text_offset == [len(server.text.tokenizer.decode(ids[:place])) for place in range(9)]


async def test_errors_are_what_the_client_knows(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-6-astra", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.chat.completions.create(model=MODEL, messages=HELLO, modalities=["audio"])
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_field", "modalities")


async def test_a_failure_in_the_middle_raises_in_the_client(client: AsyncOpenAI, server: Server) -> None:
    server.generator.fail_at = 4
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for part in stream:
            texts.append(part.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="an expert could not be read"):
        await read()
    text = "".join(texts)
    assert text
    assert TEXT.startswith(text)


async def test_cancelling_midway_cancels_the_generation(client: AsyncOpenAI, server: Server) -> None:
    await server.generator.allow(3)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    async for part in stream:
        if part.choices[0].delta.content:
            break
    assert len(server.generator.active) == 1
    await stream.close()
    await server.generator.until_idle()
    assert list(server.generator.outcomes.values()) == [FinishReason.CANCELLED]


async def test_a_message_may_come_back_as_it_went(client: AsyncOpenAI, server: Server) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    talk: list[Any] = [*HELLO, reply.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    await client.chat.completions.create(model=MODEL, messages=talk, max_tokens=1)
    shown = server.generator.tokenizer._backend.decode(server.generator.seen[1].prompt_ids, skip_special_tokens=False)
    assert f"<|im_start|>assistant\n{reply.choices[0].message.content}<|im_end|>\n<|im_start|>user\na" in shown


async def test_hints_are_taken_and_named_in_the_reply(client: AsyncOpenAI, server: Server) -> None:
    """What other tools send along, and what a talk with a reasoning model looks like when it is sent back."""
    cached = {"cache_control": {"type": "ephemeral"}}
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hello", **cached}]},
        {"role": "assistant", "content": "hi", "reasoning_content": "they said hello"},
        {"role": "user", "content": "hello", **cached},
    ]
    plain = [{"role": one["role"], "content": "hi" if one["role"] == "assistant" else "hello"} for one in talk]
    hints: dict[str, Any] = {
        "metadata": {"team": "a"}, "store": True, "prompt_cache_key": "k", "service_tier": "flex", "verbosity": "low",
        "user": "ann",
    }  # fmt: skip
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=talk, **hints)
    named = set(raw.headers["Greenroom-Without-Effect"].split(", "))
    in_messages = {"messages[].cache_control", "messages[].content[].cache_control", "messages[].reasoning_content"}
    assert named == {*hints, *in_messages}
    assert raw.parse().choices[0].message.content == TEXT
    without = await client.chat.completions.with_raw_response.create(model=MODEL, messages=plain)  # type: ignore[arg-type]
    assert "Greenroom-Without-Effect" not in without.headers
    first, second = server.generator.seen
    assert first.prompt_ids == second.prompt_ids
    async with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, stream=True, store=True
    ) as streamed:
        assert streamed.headers["Greenroom-Without-Effect"] == "store"
        await streamed.read()


CONTENT = [{"type": "text", "text": "hello"}]
AS_SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (
        "completions",
        {
            "model": MODEL, "prompt": "hello", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 5,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        },
    ),
    "vllm bench serve, chats": (
        "chat/completions",
        {
            "model": MODEL, "messages": [{"role": "user", "content": CONTENT}], "temperature": 0.0,
            "max_completion_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        },
    ),
    "guidellm": (
        "chat/completions",
        {
            "model": MODEL, "messages": [{"role": "user", "content": CONTENT}], "max_completion_tokens": 5,
            "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "aiperf": (
        "chat/completions",
        {
            "model": MODEL, "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", AS_SENT)
async def test_requests_as_load_generators_send_them(server: Server, tool: str) -> None:
    path, body = AS_SENT[tool]
    async with server.http.post(f"{server.url}/v1/{path}", json=body) as response:
        raw = await response.read()
        assert (response.status, raw.endswith(b"data: [DONE]\n\n")) == (200, True), raw
    assert b'"completion_tokens":5' in raw


async def test_a_refusal_names_the_hints_too(server: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "store": True, "n": 0}
    status, _, headers = await server.post("/v1/chat/completions", body)
    assert (status, headers["Greenroom-Without-Effect"]) == (400, "store")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_of_others_than_the_assistant_is_refused(server: Server, field: str) -> None:
    messages = [{"role": "user", "content": "x", field: "well"}]
    status, body, _ = await server.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert (status, body["error"]["param"]) == (400, f"messages[0].{field}")


@pytest.mark.parametrize("config", [{}, {"model_root": "org/original"}])
async def test_models_as_vllm_describes_them(client: AsyncOpenAI, server: Server, config: dict[str, Any]) -> None:
    """Its `bench serve` asks for them when it is given no model, and loads the tokenizer of ``root``."""
    [model] = [one.model_dump() async for one in client.models.list()]
    assert model["root"] == config.get("model_root", MODEL)
    assert model["parent"] is None
    assert model["max_model_len"] == server.generator.model.max_model_len
