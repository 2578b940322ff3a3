"""The prompt told before the answer, in OpenAI's shape, by itself and by way of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.pipeline.gateway.conftest import Server

MODEL = "org/small"
PROMPT = "Hello there, the quick brown fox! naïve café"


@pytest.fixture(params=[False, True], ids=["alone", "pipeline"])
def through_log(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def client(server: Server) -> Any:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(server: Server, text: str = PROMPT) -> list[int]:
    return server.text.tokenizer.encode(text, add_special_tokens=True)


def check_prompt_logprobs(server: Server, logprobs: Any, ids: list[int]) -> None:
    """Those of the script: see ScriptedGenerator."""
    tokenizer = server.text.tokenizer
    count = len(ids)
    assert logprobs.token_logprobs[:count] == [None, *(-place / 8 for place in range(1, count))]
    assert logprobs.top_logprobs[0] is None
    assert all(len(top) == 1 for top in logprobs.top_logprobs[1:count])
    assert logprobs.text_offset[:count] == [len(tokenizer.decode(ids[:place])) for place in range(count)]


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_likelihoods(client: AsyncOpenAI, server: Server, max_tokens: int) -> None:
    """As evaluation harnesses ask for them: entries of the prompt, then those of the answer."""
    reply = await client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    [choice] = reply.choices
    ids = ids_of(server)
    generated = server.generator._text_of(server.generator.seen[0])[:max_tokens]
    answer = server.text.tokenizer.decode(generated)
    assert choice.text == PROMPT + answer
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs is not None
    check_prompt_logprobs(server, logprobs, ids)
    for entries in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset):
        assert entries is not None
        assert len(entries) == len(ids) + max_tokens
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[len(ids) :] == [-0.25 - place for place in range(max_tokens)]
    if max_tokens:
        assert logprobs.text_offset is not None
        assert logprobs.text_offset[len(ids)] == len(PROMPT)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), max_tokens)


async def test_a_stream_joins_to_the_whole(client: AsyncOpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "echo": True, "max_tokens": 7, "temperature": 0}
    for logprobs in (None, 0, 2):
        whole = await client.completions.create(**fields, logprobs=logprobs)
        stream = await client.completions.create(**fields, logprobs=logprobs, stream=True)
        parts = [part.choices[0] async for part in stream]
        assert "".join(part.text for part in parts) == whole.choices[0].text
        assert parts[0].text.startswith(PROMPT)
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        found = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or ()]
        wanted = whole.choices[0].logprobs
        assert found == ([] if wanted is None else wanted.token_logprobs)


async def test_every_prompt_and_choice_has_its_own(client: AsyncOpenAI, server: Server) -> None:
    prompts = ["Hello world", PROMPT]
    reply = await client.completions.create(
        model=MODEL, prompt=prompts, echo=True, logprobs=0, max_tokens=2, n=2, seed=1
    )
    for place, choice in enumerate(sorted(reply.choices, key=lambda choice: choice.index)):
        prompt = prompts[place // 2]
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(ids_of(server, prompt)) + 2


async def test_a_prompt_of_tokens_is_told_as_their_text(client: AsyncOpenAI, server: Server) -> None:
    ids = ids_of(server)
    for prompt in (ids, [ids]):
        reply = await client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        assert reply.choices[0].text == server.text.tokenizer.decode(ids)
        check = reply.choices[0].logprobs
        assert check is not None
        assert check.token_logprobs is not None
        assert len(check.token_logprobs) == len(ids)


async def test_special_tokens_that_are_written_in_the_prompt_stand_where_they_are(
    client: AsyncOpenAI, server: Server
) -> None:
    prompt = "<|im_start|>user\nHi 🚀<|im_end|>\n"
    reply = await client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    places = dict(zip(logprobs.tokens, logprobs.text_offset, strict=True))
    assert (places["<|im_start|>"], places["<|im_end|>"]) == (0, prompt.index("<|im_end|>"))
    assert logprobs.text_offset[-1] == len(prompt)


@pytest.mark.parametrize("ids", [[-1], [10**6], [10**30]])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_the_model_has_not_are_refused(server: Server, ids: list[int], stream: bool) -> None:
    body = {"model": MODEL, "prompt": [[7], ids], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    status, reply, _ = await server.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "prompt" if abs(ids[0]) < 2**63 else "prompt[1][0]")
    assert server.generator.seen == []


async def test_a_prompt_of_one_token_has_no_likelihood(client: AsyncOpenAI, server: Server) -> None:
    [one] = ids_of(server, "H")[-1:]
    reply = await client.completions.create(model=MODEL, prompt=[one], echo=True, logprobs=1, max_tokens=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    found: Any = (logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert found == ([None], [None], [0])


async def test_without_logprobs_the_text_comes_as_it_is_made(client: AsyncOpenAI, server: Server) -> None:
    await server.generator.allow(1)
    stream = await client.completions.create(model=MODEL, prompt=PROMPT, echo=True, max_tokens=5, stream=True)
    first = await anext(aiter(stream))
    assert first.choices[0].text.startswith(PROMPT)
    await server.generator.allow(None)
    rest = [part async for part in stream]
    assert rest[-1].choices[0].finish_reason == "length"


async def test_a_stop_string_of_the_prompt_ends_nothing(client: AsyncOpenAI, server: Server) -> None:
    for logprobs in (None, 1):
        reply = await client.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, max_tokens=60, stop=["fox"], logprobs=logprobs
        )
        assert reply.choices[0].text == PROMPT + "Hello there, the quick brown "
        assert reply.choices[0].finish_reason == "stop"


async def test_where_the_worker_gives_none_it_is_an_error(server: Server) -> None:
    server.generator.gives_logprobs = False
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    status, reply, _ = await server.post("/v1/completions", body)
    assert (status, reply["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_answer_of_no_tokens(server: Server, path: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 0}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    status, reply, _ = await server.post(f"/v1/{path}", body)
    assert status == 200
    [choice] = reply["choices"]
    assert (choice.get("text", "") or choice.get("message", {}).get("content", "")) == ""
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
