"""Where spans are sent."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from greenroom.core.errors import InvalidConfig

PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """``endpoint``: of the collector, as OTEL_EXPORTER_OTLP_ENDPOINT has it (http://host:4317, or https).
    ``protocol``: grpc or http/protobuf; by default what OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc. ``service``,
    ``instance``: the source of the spans. ``queue``: how many spans may wait; more are dropped. ``send_every_s``: how
    often waiting spans are sent. ``timeout_s``: of one attempt to send. All else (sampling, headers, certificates) is
    read from OpenTelemetry's own variables. Raises InvalidConfig, naming the field."""

    endpoint: str
    protocol: str = field(default_factory=lambda: os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc")
    service: str = "greenroom"
    instance: str = ""
    queue: int = 4096
    send_every_s: float = 2.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidConfig("otlp_endpoint", self.endpoint, "write it as http://HOST:PORT or https://HOST:PORT")
        if self.protocol not in PROTOCOLS:
            raise InvalidConfig("otlp_protocol", self.protocol, f"known: {', '.join(PROTOCOLS)}")
        if self.queue < 1:
            raise InvalidConfig("queue", self.queue, "it is a number from 1")
        for name in ("send_every_s", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number of seconds above 0")

    @property
    def traces_url(self) -> str:
        """Where the HTTP protocol posts them."""
        endpoint = self.endpoint.rstrip("/")
        return endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
