"""Clients that we did not write, over a real broker: openai, gRPC by reflection alone, health probes, scrapers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text

from greenroom.core.generation import FinishReason
from greenroom.core.messages import Outcome
from greenroom.demo.tasks import TASKS, samples
from greenroom.gateway.requests.call_headers import base_id
from greenroom.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.cluster import Cluster, running
from tests.integration.pipeline.topics import Journal, Topics, completed, until
from tests.kafka.broker import Broker
from tests.waiting import DEADLINE_S

MODEL = "greenroom-understudy"
PROMPT = next(iter(samples("converse", 1, seed=3))).prompt
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
LONG_TOKENS = 700
"""So many take a second or more, and leave room in the worker's memory for another request to wait there."""
TRIES = 5
"""A machine that is busy with something else may set a scene too late: its long request has ended."""


@pytest.fixture(scope="module")
def cluster(
    kafka_broker: Broker, cache: Path, tmp_path_factory: pytest.TempPathFactory, module_prefix: str
) -> Iterator[Cluster]:
    """One request runs, one waits at the worker, the others at the scheduler."""
    options = {
        "worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "1", "--max-queued", "1"],
    }
    folder = tmp_path_factory.mktemp("clients")
    with running(Cluster(folder, kafka_broker.address, prefix=module_prefix, cache=cache, options=options)) as made:
        yield made
        made.check_logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.urls[0]}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


async def short(client: openai.AsyncOpenAI) -> str:
    reply = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=32)
    return reply.choices[0].message.content or ""


async def test_openai_streams_what_it_gets_whole(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == [MODEL]
    whole = await short(client)
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


# Clients that want no more


class TooLate(Exception):
    """The request that a scene's others wait for has ended before they did."""


async def played(scene: Callable[[], Awaitable[None]], places: Places) -> None:
    """``scene``, anew where it was too late."""
    for _ in range(TRIES):
        with suppress(TooLate):
            return await scene()
        await places.are_free()
    raise AssertionError(f"the long request ended too early {TRIES} times")


class Places:
    """Where requests are, as the services say."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self._scheduler, self._worker, self._journal = cluster["scheduler0"], cluster["worker0"], journal

    async def are(self, placed: int, waiting: int, *, beside: str = "") -> None:
        """Wait until so many are on the worker, and so many at the scheduler. Raises TooLate if ``beside``, a request
        that runs meanwhile, ends first."""
        found: list[float | None] = []

        def settled() -> bool:
            found[:] = [self._scheduler.metric(f"greenroom_scheduler_{name}") for name in ("placed", "waiting")]
            return found == [placed, waiting]

        deadline = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(settled):
            await self._journal.catch_up()
            if self._journal.of(beside):
                raise TooLate
            assert time.monotonic() < deadline, f"placed and waiting are {found}, not {[placed, waiting]}"

    async def are_free(self) -> None:
        await self.are(0, 0)
        await until(lambda: self._worker.metric("greenroom_worker_runs_here") == 0, "nothing runs")
        await until(lambda: self._worker.metric("greenroom_kv_reserved_bytes") == 0, "no memory is held")


def outcome_id(request_id: str) -> str:
    """Of its one choice, as the journal has it."""
    return f"{request_id.removesuffix('-0')}-0"


def cancelled_beside(known: set[str]) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.reason is FinishReason.CANCELLED and outcome.request_id not in known


async def test_a_client_that_hangs_up_ends_what_runs_and_what_waits(
    cluster: Cluster, topics: Topics, client: openai.AsyncOpenAI
) -> None:
    places = Places(cluster, topics.journal)
    before = await short(client)

    async def ask(tokens: int) -> openai.AsyncStream[Any]:
        return await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )

    async def scene() -> None:
        running_stream = await ask(LONG_TOKENS)
        first = await anext(aiter(running_stream))
        runs = f"{first.id.removeprefix('chatcmpl-')}-0"
        at_worker = asyncio.create_task(ask(16))
        await places.are(2, 0, beside=runs)
        at_scheduler = asyncio.create_task(ask(16))
        await places.are(2, 1, beside=runs)
        await topics.journal.catch_up()
        ended = {outcome.request_id for outcome in topics.journal.outcomes}
        for waits in (at_scheduler, at_worker):
            waits.cancel()
            with suppress(asyncio.CancelledError):
                await waits
            outcome = await topics.journal.outcome(cancelled_beside(ended))
            assert outcome.request_id != runs
            assert outcome.token_ids == ()
            ended.add(outcome.request_id)
        assert not topics.journal.of(runs), "the one that runs goes on"
        await running_stream.close()
        assert (await topics.journal.outcome(runs)).reason is FinishReason.CANCELLED

    await played(scene, places)
    await places.are_free()
    assert await short(client) == before


async def test_a_call_of_cancel_ends_what_runs_and_what_waits(
    cluster: Cluster, topics: Topics, client: openai.AsyncOpenAI
) -> None:
    places = Places(cluster, topics.journal)

    def asked(tokens: int) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(text=PROMPT, max_tokens=tokens, ignore_eos=True)

    async def scene() -> None:
        calls = [stub.GenerateStream(asked(LONG_TOKENS))]
        ids = [(await anext(aiter(calls[0]))).request_id]
        runs = outcome_id(ids[0])
        for number in (1, 2):  # of one that waits no event says the id; under a key it is known
            key = uuid.uuid4().hex
            calls.append(stub.GenerateStream(asked(16), metadata=(("idempotency-key", key),)))
            ids.append(base_id("", key))
            await places.are(2, number - 1, beside=runs)
        for call, request_id in reversed(list(zip(calls, ids, strict=True))):
            await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
            outcome = await topics.journal.outcome(outcome_id(request_id))
            assert outcome.reason is FinishReason.CANCELLED
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [event async for event in call]
            assert error.value.code() is grpc.StatusCode.CANCELLED

    async with grpc.aio.insecure_channel(cluster.grpc_addresses[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await played(scene, places)
    await places.are_free()
    assert await short(client)


# gRPC


class Reflected:
    """A service as its server describes it: no stub of ours, no type of ours."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        self._service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(service)

    def call(self, method: str, fields: dict[str, Any]) -> Any:
        """The response, or an iterator over the responses."""
        found: MethodDescriptor = self._service.FindMethodByName(method)
        request = message_factory.GetMessageClass(found.input_type)(**fields)
        kind = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        callable_ = kind(
            f"/{self._service.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(found.output_type).FromString,
        )
        return callable_(request, timeout=60)


def test_a_grpc_client_that_knows_nothing_but_reflection(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_addresses[0]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"greenroom.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())
        inference = Reflected(channel, "greenroom.v1.Inference")
        model = inference.call("GetModel", {})
        assert model.name == MODEL
        asked = {"chat": {"messages": [{"role": "user", "content": PROMPT}]}, "temperature": 0, "max_tokens": 32}
        whole = inference.call("Generate", asked)
        events = list(inference.call("GenerateStream", asked))
        assert "".join(event.text for event in events) == whole.text != ""
        assert [i for event in events for i in event.tokens.ids] == list(whole.token_ids)
        assert events[-1].end.usage.completion_tokens == len(whole.token_ids)
        with pytest.raises(grpc.RpcError) as error:
            inference.call("Generate", {"text": "x", "temperature": 9})
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "temperature" in (error.value.details() or "")


@pytest.mark.parametrize(
    ("process", "service"),
    [
        ("gateway0", "greenroom.v1.Inference"),
        ("gateway0 inside", "greenroom.v1.Tokens"),
        ("worker0", "greenroom.v1.Worker"),
        ("predictor0", "greenroom.v1.Predictor"),
    ],
)
def test_the_standard_health_probe(cluster: Cluster, process: str, service: str) -> None:
    name, _, inside = process.partition(" ")
    address = cluster.grpc_addresses[0] if name == "gateway0" and not inside else cluster[name].listens
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for asked in ("", service):
            answer = health.Check(health_pb2.HealthCheckRequest(service=asked), timeout=DEADLINE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=DEADLINE_S)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


# What others read over HTTP


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gateway0", "greenroom_time_to_first_token_seconds"),
        ("gateway0", "greenroom_gateway_flights"),
        ("tasktype0", "greenroom_tasktype_requests"),
        ("scheduler0", "greenroom_scheduler_waiting"),
        ("predictor0", "greenroom_predictor_sequences"),
        ("worker0", "greenroom_worker_runs"),
        ("worker0", "greenroom_members"),
    ],
)
async def test_metrics_are_read_by_others_parsers(
    cluster: Cluster, client: openai.AsyncOpenAI, name: str, family: str
) -> None:
    await short(client)
    process = cluster[name]
    for parse, accept in ((prometheus_text, "text/plain"), (open_metrics, "application/openmetrics-text")):
        families = {found.name: found for found in parse(process.metrics(accept))}
        assert families[family].samples, accept
        assert all(found.documentation for found in families.values())
        assert families["process_cpu_seconds"].samples[0].value > 0
        ours = [found for known, found in families.items() if known.startswith("greenroom_")]
        assert all(found.type in ("counter", "gauge", "histogram") for found in ours)


async def test_outcomes_in_the_journal_are_what_clients_were_told(topics: Topics, client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=32)
    outcome = await topics.journal.outcome(f"{reply.id.removeprefix('chatcmpl-')}-0")
    assert completed(outcome)
    assert outcome.reason.value == reply.choices[0].finish_reason
    assert reply.usage is not None
    assert (outcome.prompt_tokens, len(outcome.token_ids)) == (reply.usage.prompt_tokens, reply.usage.completion_tokens)
    assert outcome.task_type in (*TASKS, "unknown")
