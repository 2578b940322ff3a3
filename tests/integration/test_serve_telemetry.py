"""`greenroom serve` tells where its time goes: spans at a collector, lines of the log as JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server import Server

pytest.importorskip("opentelemetry.sdk", reason="greenroom[otlp] is not installed")

from tests.otlp_collector import collecting_over_grpc, text_attributes

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def complete(server: Server, **fields: Any) -> int:
    """The status of a request that is part of ``TRACE``."""
    body = {"model": "greenroom-understudy", "prompt": "a", "max_tokens": 2, **fields}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_spans_reach_the_collector_and_every_line_is_json(tmp_path: Path) -> None:
    with collecting_over_grpc() as collector:
        options = ("--otlp-endpoint", collector.endpoint, "--log-format", "json", "--instance", "left")
        with Server("--expert-memory", "25%", *options, cache=tmp_path) as server:
            assert complete(server) == 200
            assert complete(server, temperature=-1) == 400
            server.metrics()
            assert server.terminate() == 0
    spans = collector.all
    assert {span.trace_id.hex() for span in spans} == {TRACE}, "what asks for metrics is not traced"
    fronts = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert [(span.name, span.status.code) for span in fronts] == [("POST /v1/completions", 0)] * 2
    assert {"tasktype", "place", "/greenroom.v1.Worker/Run", "outcome"} <= {span.name for span in spans}
    resource = collector.resource
    assert resource["service.name"] == "greenroom-serve"
    assert resource["service.instance.id"].startswith("left.")
    lines = [json.loads(line) for line in server.log]
    assert {(line["service"], line["instance"]) for line in lines} == {("serve", resource["service.instance.id"])}
    about = [line for line in lines if line.get("request_id") == "mine"]
    assert {line["trace_id"] for line in about} == {TRACE}
    assert any("POST /v1/completions 200" in line["message"] for line in about)
    assert any(line["message"].startswith("stopping") for line in lines)
    assert text_attributes(fronts[1])["code"] == "invalid_value"
