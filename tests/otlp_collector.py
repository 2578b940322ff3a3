"""A collector of OpenTelemetry's traces that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from greenroom.fabric import telemetry
from greenroom.fabric.telemetry import TelemetryConfig

_END_S = 10.0
_LONGEST_S = 240.0


class Collector:
    """What was sent to it, at ``endpoint``. While ``answers`` is not set, senders wait."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.answers = threading.Event()
        self.answers.set()
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def all(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def spans(self) -> dict[str, Span]:
        """The last of each name."""
        return {span.name: span for span in self.all}

    @property
    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}


def text_attributes(span: Span) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in span.attributes}


@asynccontextmanager
async def traced(collector: Collector) -> AsyncIterator[None]:
    """This process sends its spans there; on the way out all have been sent."""
    telemetry.start(TelemetryConfig(endpoint=collector.endpoint))
    try:
        yield
    finally:
        await telemetry.stop(_END_S)


@contextmanager
def collecting_over_grpc() -> Iterator[Collector]:
    collector = Collector()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            collector.requests.append(request)
            collector.answers.wait(_LONGEST_S)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait(_END_S)


@contextmanager
def collecting_over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            collector.answers.wait(_LONGEST_S)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_END_S)
