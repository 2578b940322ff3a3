"""Starting, readiness, draining, metrics, the access log."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.errors import unavailable
from greenroom.gateway.service import GatewayService
from greenroom.text import TextProcessor
from tests import small_tokenizers
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import shaped
from tests.scripted_generator import DEADLINE_S, TEXT, ScriptedGenerator

COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 100}
STREAM = {**COMPLETION, "stream": True}


async def get(server: Server, path: str) -> tuple[int, Any]:
    async with server.http.get(server.url + path) as response:
        return response.status, await response.json()


async def test_health_follows_the_generator(server: Server) -> None:
    assert await get(server, "/health") == (200, {"status": "ready"})
    server.generator.ready = False
    status, body = await get(server, "/health")
    assert (status, shaped(body)["code"]) == (503, "not_ready")
    status, body, headers = await server.post("/v1/completions", COMPLETION)
    assert (status, shaped(body)["code"], headers["Retry-After"]) == (503, "not_ready", "1")
    assert await get(server, "/live") == (200, {"status": "live"})
    server.generator.ready = True
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


@pytest.mark.parametrize("config", [{"drain_timeout_s": DEADLINE_S, "linger_s": 0}])
async def test_draining_finishes_what_runs_and_refuses_what_is_new(server: Server) -> None:
    await server.generator.allow(2)
    streamed = asyncio.ensure_future(server.http.post(server.url + "/v1/completions", json=STREAM))
    whole = asyncio.ensure_future(server.post("/v1/completions", COMPLETION))
    await server.generator.until_active(2)
    stopping = asyncio.ensure_future(server.gateway.stop())
    response = await streamed
    status, body = await get(server, "/health")
    assert (status, shaped(body)["code"]) == (503, "draining")
    status, body, _ = await server.post("/v1/completions", COMPLETION)
    assert (status, shaped(body)["code"]) == (503, "draining")
    assert (await get(server, "/live"))[0] == 200
    assert not stopping.done()
    await server.generator.allow(None)
    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert (await whole)[1]["choices"][0]["text"] == TEXT
    await asyncio.wait_for(stopping, DEADLINE_S)
    with pytest.raises(aiohttp.ClientConnectorError):
        await server.http.get(server.url + "/live")


@pytest.mark.parametrize("config", [{"drain_timeout_s": 0.05}])
async def test_what_does_not_finish_in_time_is_ended_and_told(server: Server) -> None:
    await server.generator.allow(2)
    streamed = asyncio.ensure_future(server.http.post(server.url + "/v1/completions", json=STREAM))
    whole = asyncio.ensure_future(server.post("/v1/completions", COMPLETION))
    await server.generator.until_active(2)
    await asyncio.wait_for(server.gateway.stop(), DEADLINE_S)
    last = (await (await streamed).read()).decode().split("\n\n")[-2]
    assert last.startswith("event: error\n")
    assert shaped(json.loads(last.split("data: ")[1]))["code"] == "cancelled"
    status, body, _ = await whole
    assert (status, shaped(body)["code"]) == (503, "cancelled")
    await server.settled()


async def test_stopping_twice_and_without_starting_is_harmless(server: Server, text: TextProcessor) -> None:
    await server.gateway.stop()
    await server.gateway.stop()
    gateway = Gateway(GatewayConfig(), ScriptedGenerator(text.tokenizer), text, CollectorRegistry())
    await gateway.stop()


async def test_a_taken_port_is_named(server: Server, text: TextProcessor) -> None:
    other = Gateway(GatewayConfig(port=server.port), ScriptedGenerator(text.tokenizer), text, CollectorRegistry())
    with pytest.raises(InvalidConfig, match=f"port: '127.0.0.1:{server.port}' is not allowed; it can not be listened"):
        await other.start()


async def test_metrics(server: Server) -> None:
    Gauge("greenroom_of_the_engine", "registered by another part", registry=server.registry).set(3)
    reply = (await server.post("/v1/completions", {**COMPLETION, "max_tokens": 5}))[1]
    await server.post("/v1/completions", {**COMPLETION, "max_tokens": -1})
    async with server.http.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    model = ("model_name", "org/small")
    assert values["greenroom_prompt_tokens_total", model] == reply["usage"]["prompt_tokens"]
    assert values["greenroom_generation_tokens_total", model] == 5
    assert values["greenroom_time_to_first_token_seconds_count", model] == 1
    assert values["greenroom_inter_token_latency_seconds_count", model] == 4
    assert values["greenroom_e2e_request_latency_seconds_count", model] == 1
    assert values["greenroom_request_success_total", ("finished_reason", "length"), model] == 1
    assert values["greenroom_request_success_total", ("finished_reason", "stop"), model] == 0
    assert values["greenroom_http_requests_total", ("path", "/v1/completions"), ("status", "200")] == 1
    assert values["greenroom_http_requests_total", ("path", "/v1/completions"), ("status", "400")] == 1
    assert values["greenroom_http_errors_total", ("code", "invalid_value")] == 1
    assert values["greenroom_of_the_engine",] == 3
    assert families["greenroom_time_to_first_token_seconds"].type == "histogram"


async def test_waiting_and_running(server: Server) -> None:
    await server.generator.allow(0)
    first = asyncio.ensure_future(server.http.post(server.url + "/v1/completions", json=STREAM))
    await server.generator.until_active(1)
    assert (server.metric("num_requests_waiting"), server.metric("num_requests_running")) == (1, 0)
    await server.generator.allow(2)
    response = await first
    await response.content.readuntil(b"\n\n")
    assert (server.metric("num_requests_waiting"), server.metric("num_requests_running")) == (0, 1)
    await server.generator.allow(None)
    await response.read()
    assert (server.metric("num_requests_waiting"), server.metric("num_requests_running")) == (0, 0)


async def test_unknown_paths_share_one_label(server: Server) -> None:
    for path in ("/a", "/b?c=d", "/v1/x"):
        async with server.http.get(server.url + path) as response:
            await response.read()
    assert server.metric("http_requests_total", path="unmatched", status="404") == 3


async def test_the_access_log_is_one_line_an_exchange(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="greenroom.gateway.access"):
        headers = {"X-Request-Id": "mine"}
        await server.post("/v1/completions", {**COMPLETION, "user": "ann\nbob"}, headers=headers)
        await server.post("/v1/completions?x=a%0Ab", {**COMPLETION, "n": 0}, headers=headers)
        await get(server, "/health")
        server.generator.ready = False
        await get(server, "/health")
    lines = access_lines(caplog)
    assert len(lines) == 3
    assert lines[0].startswith("mine POST /v1/completions 200 ")
    assert lines[0].endswith(r"user='ann\nbob'")
    assert lines[1].startswith("mine POST /v1/completions 400 ")
    assert lines[1].endswith("error=invalid_value param='n'")
    assert " GET /health 503 " in lines[2]  # the one that was well has no line
    assert "\n" not in "".join(lines)


async def test_the_access_log_says_when_health_changes(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """It does not matter how often health is asked in between."""

    async def asked_thrice() -> None:
        for _ in range(3):
            await get(server, "/health")

    with caplog.at_level(logging.INFO, logger="greenroom.gateway.access"):
        await asked_thrice()
        server.generator.ready = False
        await asked_thrice()
        server.generator.ready = True
        await asked_thrice()
    lines = [line for line in access_lines(caplog) if "/health" in line]
    assert [line.split(" ms")[1] for line in lines] == [" error=not_ready", ""]
    assert " GET /health 200 " in lines[1]


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "greenroom.gateway.access"]


async def test_without_a_chat_template_only_chat_is_refused(tmp_path: Any) -> None:
    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), eos_token="<|im_end|>")
    text = TextProcessor.from_folder(folder)
    generator = ScriptedGenerator(text.tokenizer)
    gateway = Gateway(GatewayConfig(port=0), generator, text, CollectorRegistry())
    url = f"http://127.0.0.1:{await gateway.start()}/v1/"
    try:
        async with aiohttp.ClientSession() as http:
            chat = {"model": "org/small", "messages": [{"role": "user", "content": "x"}]}
            async with http.post(url + "chat/completions", json=chat) as response:
                error = shaped(await response.json())
                assert (response.status, error["code"], error["param"]) == (400, "no_chat_template", "messages")
                assert "use /v1/completions, or put a chat_template.jinja" in error["message"]
            async with http.post(url + "completions", json=COMPLETION) as response:
                assert (response.status, (await response.json())["choices"][0]["text"]) == (200, TEXT)
    finally:
        await gateway.stop()


async def test_a_large_prompt_is_prepared_in_a_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then holds up no other request. Its result is the same, and so are its errors."""
    short, long = "hello there ", "hello there " * 3000
    server.generator.model = ScriptedGenerator(server.text.tokenizer, max_model_len=10**6).model
    encode, threads = server.text.tokenizer.encode, []

    def encode_and_note(text: str, *, add_special_tokens: bool) -> list[int]:
        if text in (short, long):
            threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.text.tokenizer, "encode", encode_and_note)
    for prompt in (short, long):
        status, _, _ = await server.post("/v1/completions", {**COMPLETION, "prompt": prompt, "max_tokens": 1})
        assert status == 200
        assert list(server.generator.seen[-1].prompt_ids) == encode(prompt, add_special_tokens=True)
    status, body, _ = await server.post("/v1/completions", {**COMPLETION, "prompt": long, "temperature": 9})
    assert (status, shaped(body)["param"]) == (400, "temperature")
    assert threads == [True, False, False]


async def test_a_generator_that_just_died_is_not_the_requests_fault(server: Server) -> None:
    server.generator.refusal = GreenroomError("the batch loop has stopped")
    server.generator.on_refusal = lambda: setattr(server.generator, "ready", False)
    status, body, headers = await server.post("/v1/completions", COMPLETION)
    assert (status, shaped(body)["code"], headers["Retry-After"]) == (503, "not_ready", "1")
    assert "the batch loop has stopped" in body["error"]["message"]


async def test_as_a_part_of_a_process(server: Server, text: TextProcessor) -> None:
    generator = ScriptedGenerator(text.tokenizer)
    service = GatewayService(Gateway(GatewayConfig(port=0, grpc_port=0), generator, text, CollectorRegistry()))
    await service.start()
    assert service.unready is None
    generator.ready = False
    assert service.unready == "the server is not ready yet"
    generator.ready = True
    failed = asyncio.ensure_future(service.failed())
    await generator.allow(1)
    url = f"http://127.0.0.1:{service.port}/v1/completions"
    streamed = asyncio.ensure_future(server.http.post(url, json=STREAM))
    await generator.until_active(1)
    await asyncio.wait_for(service.drain(0.05), DEADLINE_S)
    assert service.unready == "the server is stopping and takes no new requests"
    assert b'"cancelled"' in await (await streamed).read()
    await asyncio.wait_for(service.stop(), DEADLINE_S)
    await generator.until_idle()
    assert not failed.done()
    failed.cancel()


async def test_a_taken_port_of_the_rpcs_is_named(server: Server, text: TextProcessor) -> None:
    config = GatewayConfig(port=0, grpc_port=server.port)
    other = Gateway(config, ScriptedGenerator(text.tokenizer), text, CollectorRegistry())
    with pytest.raises(InvalidConfig, match="grpc_port: "):
        await other.start()


async def test_a_model_that_is_not_known_yet(text: TextProcessor) -> None:
    """A pipeline has none before its first worker. The gateway listens already, and says 503."""

    class Waiting(ScriptedGenerator):
        known = False

        def __getattribute__(self, name: str) -> Any:
            if name == "model" and not type(self).known:
                raise unavailable("no worker has said yet which model it serves", "not_ready")
            return super().__getattribute__(name)

    generator = Waiting(text.tokenizer)
    generator.ready = False
    registry = CollectorRegistry()
    gateway = Gateway(GatewayConfig(port=0), generator, text, registry)
    url = f"http://127.0.0.1:{await gateway.start()}"
    try:
        async with aiohttp.ClientSession() as http:
            for path in ("/health", "/v1/models"):
                async with http.get(url + path) as response:
                    assert (response.status, shaped(await response.json())["code"]) == (503, "not_ready")
            async with http.get(url + "/metrics") as response:
                assert response.status == 200
            Waiting.known = True
            generator.ready = True
            async with http.post(url + "/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
    finally:
        await gateway.stop()
