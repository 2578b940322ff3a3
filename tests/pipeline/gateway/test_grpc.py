"""The RPCs by a plain client of the generated stubs: the same server, checks and ends as over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from greenroom.core.errors import Conflict, InvalidRequest, Saturated
from greenroom.core.generation import Finished, FinishReason, SamplingParams, Slo
from greenroom.fabric.log import LogFailed
from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys
from greenroom.gateway.requests.call_headers import base_id
from greenroom.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_call_headers import ends_with
from tests.scripted_generator import DEADLINE_S, TEXT

Request = inference_pb2.GenerateRequest
STOP, LENGTH = common_pb2.END_REASON_STOP, common_pb2.END_REASON_LENGTH


@pytest.fixture
def config() -> dict[str, Any]:
    return {"grpc_port": 0}


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.gateway.grpc_port}") as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


def hello(**fields: Any) -> Request:
    return Request(text="hello", **fields)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Status, details and trailing metadata of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await call
    error = caught.value
    return error.code(), error.details() or "", dict(error.trailing_metadata() or ())


async def events_of(call: Any) -> list[inference_pb2.GenerateEvent]:
    events: list[inference_pb2.GenerateEvent] = []
    async with asyncio.timeout(DEADLINE_S):
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
    return events


async def test_whole(stub: Any, server: Server) -> None:
    reply = await stub.Generate(hello())
    [request] = server.generator.seen
    assert (reply.text, reply.reason, reply.request_id) == (TEXT, STOP, request.request_id)
    said = server.text.tokenizer.encode(TEXT, add_special_tokens=False)
    assert list(reply.token_ids) == [*said, *server.generator.model.eos_token_ids]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(request.prompt_ids), len(said) + 1)
    assert list(reply.logprobs) == []
    room = server.generator.model.max_model_len - len(request.prompt_ids)
    assert request.sampling.max_tokens == room, "absent: up to the end of the context"


async def test_a_stream_says_the_same(stub: Any, server: Server) -> None:
    whole = await stub.Generate(hello(logprobs=1))
    await server.generator.allow(1)
    call = stub.GenerateStream(hello(logprobs=1))
    reading = asyncio.ensure_future(events_of(call))
    await server.generator.until_active(1)
    await server.generator.allow(None)
    events = await reading
    assert "".join(event.text for event in events) == whole.text
    assert [token for event in events for token in event.tokens.ids] == list(whole.token_ids)
    assert [logprob for event in events for logprob in event.tokens.logprobs] == list(whole.logprobs)
    assert len(whole.logprobs) == len(whole.token_ids)
    place = 0
    for event in events:
        assert event.tokens.start == (place if event.tokens.ids else 0)
        place += len(event.tokens.ids)
    assert [event.HasField("end") for event in events] == [False] * (len(events) - 1) + [True]
    assert (events[-1].end.reason, events[-1].end.usage) == (STOP, whole.usage)
    assert {event.request_id for event in events} == {server.generator.seen[1].request_id}


async def test_the_usage_says_what_was_approximated(stub: Any, server: Server) -> None:
    assert (await stub.Generate(hello())).usage.approximated == 0
    server.generator.approximates = lambda request: 0.25
    assert (await stub.Generate(hello())).usage.approximated == 0.25
    assert (await events_of(stub.GenerateStream(hello())))[-1].end.usage.approximated == 0.25


async def test_an_answer_that_ends_before_its_share_is_known_does_not_pass_for_exact(stub: Any, server: Server) -> None:
    """The generator went on behind a stop string."""
    server.generator.checks_stops = False
    exact = (await stub.Generate(hello())).usage
    cut = (await stub.Generate(hello(stop=["r"]))).usage
    assert (exact.approximated_unknown, cut.approximated_unknown) == (False, True)


async def test_the_kinds_of_prompt(stub: Any, server: Server) -> None:
    encode = server.text.tokenizer.encode
    messages = [inference_pb2.ChatMessage(role="user", content="hello")]
    await stub.Generate(Request(chat=inference_pb2.Chat(messages=messages), max_tokens=1))
    await stub.Generate(hello(max_tokens=1))
    await stub.Generate(Request(token_ids=inference_pb2.TokenIds(ids=encode("hello", add_special_tokens=False))))
    chat, text, ids = server.generator.seen
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(chat.prompt_ids) == encode(rendered, add_special_tokens=False)
    assert list(text.prompt_ids) == encode("hello", add_special_tokens=True)
    assert list(ids.prompt_ids) == encode("hello", add_special_tokens=False)
    assert {request.prompt for request in server.generator.seen} == {"hello"}


async def test_every_field_arrives(stub: Any, server: Server) -> None:
    request = hello(
        model="org/small", max_tokens=5, temperature=0.5, top_p=0.25, top_k=7, seed=-3, stop=["x", "y"],
        stop_token_ids=[9], ignore_eos=True, logprobs=0, task_type="sort",
        slo=inference_pb2.Slo(ttft_ms=200, e2e_ms=3000), priority=-8, timeout_ms=2500,
    )  # fmt: skip
    reply = await stub.Generate(request, metadata=(("x-slo-tpot-ms", "40"),))
    assert reply.reason == LENGTH
    [seen] = server.generator.seen
    sampling = seen.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.25, 7)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (-3, ("x", "y"), (9,))
    assert (sampling.ignore_eos, sampling.logprobs, seen.task_type) == (True, 0, "sort")
    assert (seen.slo, seen.priority, seen.timeout_s) == (Slo(ttft_ms=200, tpot_ms=40, e2e_ms=3000), -8, 2.5)


async def test_every_field_of_sampling_arrives(stub: Any, server: Server) -> None:
    await stub.Generate(
        hello(
            max_tokens=5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=0.5,
            logit_bias={9: -100, 3: 2.5}, min_tokens=2, top_p=0,
        )
    )  # fmt: skip
    [seen] = server.generator.seen
    assert seen.sampling == SamplingParams(
        max_tokens=5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=0.5,
        logit_bias=((3, 2.5), (9, -100.0)), min_tokens=2, top_p=0,
    )  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_the_log_probabilities_of_the_prompt(stub: Any, server: Server, chat: bool, max_tokens: int) -> None:
    request = hello(max_tokens=max_tokens, prompt_logprobs=1)
    if chat:
        request.chat.messages.add(role="user", content="hello there")
    reply = await stub.Generate(request)
    [end] = [event.end for event in await events_of(stub.GenerateStream(request)) if event.HasField("end")]
    ids = server.generator.seen[0].prompt_ids
    for prompt in (reply.prompt, end.prompt):
        assert tuple(prompt.ids) == ids
        assert [one.chosen for one in prompt.logprobs] == [-place / 8 for place in range(1, len(ids))]
        assert [list(one.top_ids) for one in prompt.logprobs] == [[token_id] for token_id in ids[1:]]
    assert (len(reply.token_ids), reply.usage.completion_tokens) == (max_tokens, max_tokens)
    assert reply.reason == LENGTH
    assert not (await stub.Generate(hello(max_tokens=1))).HasField("prompt")


async def test_a_greedy_request_is_greedy(stub: Any, server: Server) -> None:
    await stub.Generate(hello(temperature=0.0))
    await stub.Generate(hello())
    assert [request.sampling.temperature for request in server.generator.seen] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("request_", "status", "code", "message"),
    [
        (Request(), grpc.StatusCode.INVALID_ARGUMENT, "missing_field", "chat, text and token_ids"),
        (hello(top_p=1.5), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "top_p must be from 0 to 1"),
        (hello(min_p=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "min_p"),
        (hello(presence_penalty=3), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "presence_penalty"),
        (hello(repetition_penalty=0), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "repetition_penalty"),
        (hello(logit_bias={10**6: 1}), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "logit_bias"),
        (hello(min_tokens=9, max_tokens=5), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "min_tokens"),
        (hello(prompt_logprobs=21), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "prompt_logprobs"),
        (hello(temperature=3), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "temperature"),
        (hello(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "temperature"),
        (hello(logprobs=21), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "logprobs must be from 0 to 20"),
        (hello(priority=101), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "priority"),
        (hello(timeout_ms=0), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "timeout"),
        (hello(slo=inference_pb2.Slo(ttft_ms=-1)), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "slo.ttft_ms"),
        (hello(max_tokens=300), grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded", "256 tokens"),
        (hello(model="gpt"), grpc.StatusCode.NOT_FOUND, "model_not_found", "served: org/small"),
        (Request(chat=inference_pb2.Chat()), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value", "messages is empty"),
        (Request(token_ids=inference_pb2.TokenIds(ids=[10**6])), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value",
         "the model's are 0 to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests(
    stub: Any, server: Server, request_: Request, status: grpc.StatusCode, code: str, message: str, stream: bool
) -> None:
    call = events_of(stub.GenerateStream(request_)) if stream else stub.Generate(request_)
    told, details, trailing = await refusal(call)
    assert (told, trailing["greenroom-code"]) == (status, code)
    assert message in details
    assert server.generator.seen == []
    assert server.metric("grpc_errors_total", code=code) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e308])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
async def test_numbers_that_json_has_not(stub: Any, server: Server, field: str, value: float) -> None:
    text, chat = hello(), Request()
    chat.chat.messages.add(role="user", content="hello")
    for request in (text, chat):
        setattr(request, field, value)
    for request in (text, chat, hello(logit_bias={7: value}), hello(slo=inference_pb2.Slo(tpot_ms=value))):
        told, details, trailing = await refusal(stub.Generate(request))
        assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_value")
        assert field in details or "logit_bias" in details or "slo.tpot_ms" in details
    assert server.generator.seen == []


async def test_the_largest_whole_numbers(stub: Any, server: Server) -> None:
    most = 2**32 - 1
    await stub.Generate(hello(top_k=most, seed=-(2**63), max_tokens=1))
    assert (server.generator.seen[0].sampling.top_k, server.generator.seen[0].sampling.seed) == (most, -(2**63))
    for request in (
        hello(max_tokens=most), hello(min_tokens=most), hello(logprobs=most), hello(prompt_logprobs=most),
        hello(stop_token_ids=[most]), hello(logit_bias={most: 1}), hello(timeout_ms=most), hello(priority=2**31 - 1),
        Request(token_ids=inference_pb2.TokenIds(ids=[most])), Request(token_ids=inference_pb2.TokenIds()),
    ):  # fmt: skip
        told, _, _ = await refusal(stub.Generate(request))
        assert told == grpc.StatusCode.INVALID_ARGUMENT
    assert len(server.generator.seen) == 1


@pytest.mark.parametrize(
    ("raised", "status", "code", "after"),
    [
        (Saturated("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "saturated", "3"),
        (Conflict("not the same"), grpc.StatusCode.ALREADY_EXISTS, "idempotency_conflict", None),
        (InvalidRequest("too long", code="too_long"), grpc.StatusCode.INVALID_ARGUMENT, "too_long", None),
        (RuntimeError("secret detail"), grpc.StatusCode.INTERNAL, "internal_error", None),
    ],
)
async def test_what_the_generator_refuses(
    stub: Any, server: Server, raised: Exception, status: grpc.StatusCode, code: str, after: str | None
) -> None:
    server.generator.refusal = raised
    told, details, trailing = await refusal(stub.Generate(hello()))
    assert (told, trailing["greenroom-code"], trailing.get("retry-after")) == (status, code, after)
    assert "secret" not in details
    server.generator.refusal = None
    assert (await stub.Generate(hello())).text == TEXT


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.EXPIRED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (FinishReason.SHED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (FinishReason.CANCELLED, grpc.StatusCode.CANCELLED),
        (FinishReason.FAILED, grpc.StatusCode.INTERNAL),
    ],
)
async def test_ends(
    stub: Any, server: Server, monkeypatch: pytest.MonkeyPatch, reason: FinishReason, status: grpc.StatusCode
) -> None:
    gate = ends_with(server, monkeypatch, Finished(reason, 1, 3, "this is why"), 3)
    call = stub.GenerateStream(hello())
    first = await asyncio.wait_for(call.read(), DEADLINE_S)
    assert first.text
    gate.set()
    told, details, trailing = await refusal(events_of(call))
    assert (told, details) == (status, "this is why")
    assert trailing["greenroom-code"] == ("generation_failed" if reason is FinishReason.FAILED else reason.value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_cancelled_call_cancels_the_request(stub: Any, server: Server, stream: bool, tokens: int) -> None:
    await server.generator.allow(tokens)
    call = stub.GenerateStream(hello()) if stream else stub.Generate(hello())
    if stream and tokens:
        await asyncio.wait_for(call.read(), DEADLINE_S)
    await server.generator.until_active(1)
    call.cancel()
    await server.settled()
    assert list(server.generator.outcomes.values()) == [FinishReason.CANCELLED]


async def test_a_call_s_deadline_is_the_request_s(stub: Any, server: Server) -> None:
    await server.generator.allow(2)
    told, _, _ = await refusal(stub.Generate(hello(), timeout=0.3))
    assert told is grpc.StatusCode.DEADLINE_EXCEEDED
    await server.settled()
    [request] = server.generator.seen
    assert request.timeout_s is not None
    assert request.timeout_s <= 0.31


async def test_a_request_s_own_timeout(stub: Any, server: Server) -> None:
    await server.generator.allow(2)
    told, details, trailing = await refusal(stub.Generate(hello(timeout_ms=200)))
    assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "expired")
    assert "within 0.2 seconds" in details
    await server.settled()


@pytest.mark.parametrize(("keyed", "through_log"), [(False, False), (False, True), (True, True)])
async def test_cancel_by_id(stub: Any, server: Server, keyed: bool) -> None:
    metadata = (("idempotency-key", "order-1"),) if keyed else ()
    await server.generator.allow(2)
    call = stub.GenerateStream(hello(), metadata=metadata)
    first = await asyncio.wait_for(call.read(), DEADLINE_S)
    assert dict(await call.initial_metadata())["greenroom-request-id"] == first.request_id
    assert await stub.Cancel(inference_pb2.CancelRequest(request_id=first.request_id)) == inference_pb2.CancelResponse()
    told, _, trailing = await refusal(events_of(call))
    assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.CANCELLED, "cancelled")
    await server.settled()
    assert list(server.generator.outcomes.values()) == [FinishReason.CANCELLED]
    await stub.Cancel(inference_pb2.CancelRequest(request_id=first.request_id))
    await stub.Cancel(inference_pb2.CancelRequest(request_id="never-known"))
    told, _, _ = await refusal(stub.Cancel(inference_pb2.CancelRequest()))
    assert told is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_broker_and_no_topic_is_named(stub: Any, server: Server) -> None:
    server.generator.refusal = LogFailed("appending to greenroom.requests: not allowed by kafka-1.internal:9092")
    told, message, trailing = await refusal(stub.Generate(hello()))
    assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.UNAVAILABLE, "not_sent")
    assert "requests" not in message
    assert "kafka" not in message


class TestCancels:
    @pytest.fixture
    def config(self) -> dict[str, Any]:
        return {"grpc_port": 0, "cancels_per_minute": 2.0}

    async def test_those_of_what_is_not_known_are_few(self, stub: Any, server: Server) -> None:
        """Each is written to the log, and kept where requests are scheduled; any number of ids can be made up."""

        def unknown(number: int) -> inference_pb2.CancelRequest:
            return inference_pb2.CancelRequest(request_id=f"{base_id('', None)}-{number}")

        for number in range(2):
            await stub.Cancel(unknown(number))
        told, message, trailing = await refusal(stub.Cancel(unknown(2)))
        assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        assert 25 <= int(trailing["retry-after"]) <= 30
        assert "cancels a minute" in message
        await server.generator.allow(2)
        call = stub.GenerateStream(hello())
        known = await asyncio.wait_for(call.read(), DEADLINE_S)
        await stub.Cancel(inference_pb2.CancelRequest(request_id=known.request_id))
        told, _, _ = await refusal(events_of(call))
        assert told is grpc.StatusCode.CANCELLED, "what runs here can always be ended"
        await stub.Cancel(inference_pb2.CancelRequest(request_id="x"))  # no request has this id, so nothing comes of it


async def test_what_http_began_the_rpc_ends(stub: Any, server: Server) -> None:
    await server.generator.allow(2)
    body = {"model": "org/small", "prompt": "hello", "stream": True, "max_tokens": 50}
    async with server.http.post(server.url + "/v1/completions", json=body) as response:
        reply_id = f"cmpl-{response.headers['Greenroom-Request-Id']}"
        await stub.Cancel(inference_pb2.CancelRequest(request_id=reply_id))
        assert b'"cancelled"' in await response.read()
    await server.settled()


@pytest.mark.parametrize("through_log", [True])
async def test_one_key_is_one_request_over_both(stub: Any, server: Server) -> None:
    reply = await stub.Generate(hello(max_tokens=50), metadata=(("idempotency-key", "order-1"),))
    body = {"model": "org/small", "prompt": "hello", "max_tokens": 50}
    headers = {"Idempotency-Key": "order-1"}
    status, over_http, _ = await server.post("/v1/completions", body, headers=headers)
    assert (status, over_http["choices"][0]["text"]) == (200, reply.text)
    assert f"{over_http['id'].removeprefix('cmpl-')}-0" == reply.request_id
    assert len(server.generator.seen) == 1
    told, _, _ = await refusal(stub.Generate(hello(max_tokens=49), metadata=(("idempotency-key", "order-1"),)))
    assert told is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize("through_log", [True])
async def test_a_keyed_call_outlives_its_client(stub: Any, server: Server) -> None:
    keyed = {"metadata": (("idempotency-key", "order-1"),)}
    await server.generator.allow(2)
    call = stub.GenerateStream(hello(), **keyed)
    await asyncio.wait_for(call.read(), DEADLINE_S)
    call.cancel()
    retry = asyncio.ensure_future(stub.Generate(hello(), **keyed))
    await server.generator.allow(None)
    assert (await asyncio.wait_for(retry, DEADLINE_S)).text == TEXT
    assert len(server.generator.seen) == 1


async def test_get_model(stub: Any, server: Server) -> None:
    model = await stub.GetModel(inference_pb2.GetModelRequest())
    served = server.generator.model
    assert (model.name, model.max_model_len, model.vocab_size) == (
        served.name,
        served.max_model_len,
        served.vocab_size,
    )
    assert model.has_chat_template


@pytest.mark.parametrize("config", [{"grpc_port": 0, "max_body_bytes": 4096}])
async def test_a_message_too_large(stub: Any, server: Server) -> None:
    told, _, _ = await refusal(stub.Generate(Request(text="x" * 5000)))
    assert told is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.generator.seen == []


async def test_it_is_logged_and_counted(stub: Any, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="greenroom.gateway.access"):
        await stub.Generate(hello(), metadata=(("x-request-id", "mine"),))
        await refusal(stub.Generate(hello(temperature=3)))
    lines = [record.getMessage() for record in caplog.records if record.name == "greenroom.gateway.access"]
    assert lines[0].startswith("mine grpc Generate OK ")
    assert f"id={server.generator.seen[0].request_id}" in lines[0]
    assert " grpc Generate INVALID_ARGUMENT " in lines[1]
    assert lines[1].endswith("error=invalid_value param='temperature'")
    assert server.metric("grpc_requests_total", method="Generate", status="OK") == 1


class TestKeys:
    @pytest.fixture
    def key(self, tmp_path: Path) -> tuple[Path, str]:
        made, text = new_key("ann", KeyLimits(max_concurrent=1), utc_now())
        path = tmp_path / "keys.json"
        with changing(path) as present:
            write_keys(path, present.add(made))
        return path, text

    @pytest.fixture
    def config(self, key: tuple[Path, str]) -> dict[str, Any]:
        return {"grpc_port": 0, "keys_file": key[0]}

    async def test_without_one_nothing_is_done(self, stub: Any, server: Server) -> None:
        calls: list[Callable[..., Any]] = [
            lambda **more: stub.Generate(hello(), **more),
            lambda **more: events_of(stub.GenerateStream(hello(), **more)),
            lambda **more: stub.Cancel(inference_pb2.CancelRequest(request_id="x"), **more),
            lambda **more: stub.GetModel(inference_pb2.GetModelRequest(), **more),
        ]
        for call in calls:
            told, _, trailing = await refusal(call())
            assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "missing_api_key")
            told, _, trailing = await refusal(call(metadata=(("authorization", "Bearer none"),)))
            assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
        assert server.generator.seen == []

    async def test_with_one_it_goes_within_its_limits(self, stub: Any, server: Server, key: tuple[Path, str]) -> None:
        metadata = (("authorization", f"Bearer {key[1]}"),)
        await server.generator.allow(1)
        first = asyncio.ensure_future(events_of(stub.GenerateStream(hello(), metadata=metadata)))
        await server.generator.until_active(1)
        told, _, trailing = await refusal(stub.Generate(hello(), metadata=metadata))
        assert (told, trailing["greenroom-code"], trailing["retry-after"]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too_many_concurrent",
            "1",
        )
        await server.generator.allow(None)
        assert "".join(event.text for event in await first) == TEXT
        assert server.generator.seen[0].tenant == "ann"

    async def test_another_s_request_can_not_be_cancelled(
        self, stub: Any, server: Server, key: tuple[Path, str]
    ) -> None:
        made, other = new_key("bob", KeyLimits(), utc_now())
        with changing(key[0]) as present:
            write_keys(key[0], present.add(made))
        server.gateway._doorkeeper._looked = float("-inf")
        await server.generator.allow(1)
        call = stub.GenerateStream(hello(), metadata=(("authorization", f"Bearer {key[1]}"),))
        first = await asyncio.wait_for(call.read(), DEADLINE_S)
        cancel = inference_pb2.CancelRequest(request_id=first.request_id)
        await stub.Cancel(cancel, metadata=(("authorization", f"Bearer {other}"),))
        await server.generator.allow(None)
        assert first.text + "".join(event.text for event in await events_of(call)) == TEXT


async def test_health_follows_readiness(channel: grpc.aio.Channel, server: Server) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="greenroom.v1.Inference"))
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    found = []
    async with asyncio.timeout(DEADLINE_S):
        async for reply in watch:
            if reply.status == serving and serving not in found:
                server.generator.ready = False
            if serving in found and reply.status == not_serving:
                break
            found.append(reply.status)
    watch.cancel()
    server.generator.ready = True
    assert serving in found


@pytest.mark.parametrize("config", [{"grpc_port": 0, "drain_timeout_s": DEADLINE_S}])
async def test_draining_finishes_what_runs(stub: Any, server: Server) -> None:
    await server.generator.allow(2)
    running = asyncio.ensure_future(events_of(stub.GenerateStream(hello())))
    await server.generator.until_active(1)
    stopping = asyncio.ensure_future(server.gateway.stop())
    await asyncio.sleep(0)
    told, _, trailing = await refusal(stub.Generate(hello()))
    assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.UNAVAILABLE, "draining")
    await server.generator.allow(None)
    assert "".join(event.text for event in await running) == TEXT
    await asyncio.wait_for(stopping, DEADLINE_S)


async def test_what_does_not_finish_in_time_is_ended_and_told(stub: Any, server: Server) -> None:
    await server.generator.allow(2)
    call = stub.GenerateStream(hello())
    assert (await asyncio.wait_for(call.read(), DEADLINE_S)).text
    await asyncio.wait_for(server.gateway.stop(), DEADLINE_S)
    told, _, trailing = await refusal(events_of(call))
    assert (told, trailing["greenroom-code"]) == (grpc.StatusCode.UNAVAILABLE, "cancelled")


@pytest.mark.parametrize("config", [{"grpc_port": 0, "slow_client_timeout_s": 0.3}])
async def test_a_caller_that_does_not_read_is_dropped(server: Server) -> None:
    """The reply is larger than the buffers, and the caller reads none of it."""
    server.generator.model = replace(server.generator.model, max_model_len=10_000_000)
    options = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.gateway.grpc_port}", options=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GenerateStream(hello(ignore_eos=True, max_tokens=5_000_000, logprobs=20))
        await server.generator.until(lambda: len(server.generator.seen) == 1)
        await server.settled()
        call.cancel()
    assert list(server.generator.outcomes.values()) == [FinishReason.CANCELLED]
    assert server.metric("grpc_errors_total", code="client_gone") == 1
