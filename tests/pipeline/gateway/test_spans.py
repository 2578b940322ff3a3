"""The front door's spans say what clients were told, and are failures only where the server is at fault."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from greenroom.core.errors import Saturated, TransferFailed
from greenroom.fabric.lifecycle.logs import JsonLines
from greenroom.gateway.access_log import ACCESS_LOG
from greenroom.v1 import inference_pb2, inference_pb2_grpc
from tests.pipeline.gateway.conftest import Server
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.otlp_collector import Collector, collecting_over_grpc, text_attributes, traced

UNSET, ERROR = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
PATH = "/v1/completions"
NAME = f"POST {PATH}"
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 8}


@pytest.fixture
def config() -> dict[str, Any]:
    return {"grpc_port": 0}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_over_grpc() as made:
        yield made


def status_of(span: Span) -> int | None:
    """The HTTP status that it says was answered."""
    numbers = {attribute.key: attribute.value.int_value for attribute in span.attributes}
    return numbers.get("http.response.status_code")


def check_fault(span: Span, code: str) -> None:
    assert (span.status.code, span.status.message) == (ERROR, code)
    assert text_attributes(span)["error.type"] == text_attributes(span)["code"] == code


def check_no_fault(span: Span, code: str | None = None) -> None:
    assert (span.status.code, span.status.message) == (UNSET, "")
    assert "error.type" not in text_attributes(span)
    assert text_attributes(span).get("code") == code


async def test_probes_have_no_spans(server: Server, collector: Collector) -> None:
    async with traced(collector):
        server.generator.ready = False
        for path in ("/health", "/live", "/metrics"):
            async with server.http.get(server.url + path) as response:
                assert response.status == (503 if path == "/health" else 200)
        async with server.http.get(server.url + "/v1/models"):
            pass
    assert list(collector.spans) == ["GET /v1/models"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_went_well(server: Server, collector: Collector, stream: bool) -> None:
    async with (
        traced(collector),
        server.http.post(server.url + PATH, json={**COMPLETION, "stream": stream}) as response,
    ):
        assert response.status == 200
        await response.read()
        await server.over(PATH)
    [span] = collector.all
    assert status_of(span) == 200
    attributes = text_attributes(span)
    assert (span.name, attributes["http.request.method"], attributes["http.route"]) == (NAME, "POST", PATH)
    check_no_fault(span)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", PATH, {"model": "org/small"}, 400, "missing_field"),
        ("POST", PATH, {**COMPLETION, "model": "other"}, 404, "model_not_found"),
        ("GET", PATH, None, 405, "method_not_allowed"),
        ("GET", "/nowhere", None, 404, "unknown_path"),
        ("PROPFIND", PATH, None, 405, "method_not_allowed"),
    ],
)
async def test_what_the_client_did_wrong_is_no_fault(
    server: Server, collector: Collector, method: str, path: str, body: Any, status: int, code: str
) -> None:
    async with traced(collector), server.http.request(method, server.url + path, json=body) as response:
        assert response.status == status
    [span] = collector.all
    assert status_of(span) == status
    check_no_fault(span, code)
    attributes = text_attributes(span)
    assert attributes["http.request.method"] == ("_OTHER" if method == "PROPFIND" else method)
    assert attributes.get("http.route") == (PATH if (method, path) == ("POST", PATH) else None)


async def test_saturation_is_no_fault_and_failures_are(server: Server, collector: Collector) -> None:
    async with traced(collector):
        server.generator.refusal = Saturated("no room", retry_after_s=1.0)
        assert (await server.post(PATH, COMPLETION))[0] == 429
    check_no_fault(collector.spans[NAME], "saturated")
    async with traced(collector):
        server.generator.refusal = TransferFailed("a disk")
        assert (await server.post(PATH, COMPLETION))[0] == 500
    assert status_of(collector.spans[NAME]) == 500
    check_fault(collector.spans[NAME], "generation_failed")


async def test_a_reply_that_fails_after_it_began_is_a_fault(server: Server, collector: Collector) -> None:
    server.generator.fail_at = 2
    async with (
        traced(collector),
        server.http.post(server.url + PATH, json={**COMPLETION, "stream": True}) as response,
    ):
        assert response.status == 200
        assert b"generation_failed" in await response.read()
        await server.over(PATH)
    assert status_of(collector.spans[NAME]) == 200
    check_fault(collector.spans[NAME], "generation_failed")


async def test_a_client_that_leaves_is_no_fault(server: Server, collector: Collector) -> None:
    await server.generator.allow(0)
    async with traced(collector):
        asking = asyncio.create_task(server.post(PATH, COMPLETION))
        await server.generator.until_active(1)
        asking.cancel()
        gone = {"code": "client_gone"}
        await until(lambda: server.registry.get_sample_value("greenroom_http_errors_total", gone), "it is noticed")
    [span] = collector.all
    assert status_of(span) is None
    check_no_fault(span, "client_gone")


@pytest.mark.parametrize(
    ("fields", "refusal", "code", "word", "fault"),
    [
        ({}, None, "OK", None, False),
        ({"temperature": -1.0}, None, "INVALID_ARGUMENT", "invalid_value", False),
        ({}, Saturated("no room", retry_after_s=1.0), "RESOURCE_EXHAUSTED", "saturated", False),
        ({}, TransferFailed("a disk"), "INTERNAL", "generation_failed", True),
        ({}, ZeroDivisionError("a defect"), "INTERNAL", "internal_error", True),
    ],
)
async def test_calls_over_grpc(
    server: Server,
    collector: Collector,
    fields: Any,
    refusal: Exception | None,
    code: str,
    word: str | None,
    fault: bool,
) -> None:
    """With the client's own span and without."""
    request = inference_pb2.GenerateRequest(text="hello", max_tokens=2, **fields)
    server.generator.refusal = refusal
    async with traced(collector), grpc.aio.insecure_channel(f"127.0.0.1:{server.gateway.grpc_port}") as channel:
        for metadata in ((), (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)):
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
            assert (await call.code()).name == code
        rpc = server.gateway._rpc
        assert rpc is not None
        await until(lambda: not rpc.calls, "the calls are over")
    first, second = collector.all
    assert (first.parent_span_id.hex(), second.parent_span_id.hex()) == ("", "b7ad6b7169203331")
    for span in (first, second):
        attributes = text_attributes(span)
        assert attributes["rpc.response.status_code"] == code
        assert attributes.get("code") == word
        assert attributes.get("error.type") == (code if fault else None)
        assert (span.status.code, span.status.message) == ((ERROR, word) if fault else (UNSET, ""))


@pytest.fixture
def lines() -> Iterator[list[dict[str, str]]]:
    """What the access log says, as JSON."""
    found: list[dict[str, str]] = []
    stream = logging.Handler(logging.DEBUG)
    stream.setFormatter(JsonLines())
    stream.emit = lambda record: found.append(json.loads(stream.format(record)))  # type: ignore[method-assign]
    level = ACCESS_LOG.level
    ACCESS_LOG.addHandler(stream)
    ACCESS_LOG.setLevel(logging.DEBUG)
    yield found
    ACCESS_LOG.removeHandler(stream)
    ACCESS_LOG.setLevel(level)


async def test_the_access_log_names_the_trace(
    server: Server, collector: Collector, lines: list[dict[str, str]]
) -> None:
    async with traced(collector):
        assert (await server.post(PATH, COMPLETION))[0] == 200
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.gateway.grpc_port}") as channel:
            await inference_pb2_grpc.InferenceStub(channel).GetModel(inference_pb2.GetModelRequest())
    spans = collector.spans
    assert [line["trace_id"] for line in lines] == [
        spans[name].trace_id.hex() for name in (NAME, "/greenroom.v1.Inference/GetModel")
    ]


async def test_a_refused_id_leaves_the_line_of_the_log_with_one_of_its_own(
    server: Server, lines: list[dict[str, str]]
) -> None:
    for given, status in (("mine", 200), ("not mine", 400)):
        headers = {"X-Request-Id": given}
        assert (await server.post(PATH, COMPLETION, headers=headers))[0] == status
    first, second = lines
    assert first["request_id"] == "mine"
    assert second["request_id"] == second["message"].split(" ")[0] != "mine"
