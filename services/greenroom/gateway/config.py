"""How the front door is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Every limit of the front door. Times in seconds. Raises InvalidConfig, naming the field.

    ``port`` 0 takes a free one. ``max_choices``: prompts times ``n`` of one request. ``max_in_flight``: requests at
    once, waiting ones included; more are answered 429. ``stream_buffer``: parts of text that wait for one client's
    connection; beyond them its generation waits too. ``slow_client_timeout_s``: how long a client may take none of
    what is sent before it is dropped. ``keep_alive_s``: silence on a stream after which a comment is sent.
    ``drain_timeout_s``: how long stopping waits for running requests; what runs then is cancelled.
    ``system_fingerprint``: what replies carry under that name; None makes one of the version and the model's name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = MIB
    max_choices: int = 128
    max_in_flight: int = 1024
    stream_buffer: int = 256
    body_timeout_s: float = 30.0
    request_timeout_s: float = 3600.0
    slow_client_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    drain_timeout_s: float = 30.0
    system_fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig("port", self.port, "it is a number from 0 (a free one) to 65535")
        for field in ("max_body_bytes", "max_choices", "max_in_flight", "stream_buffer"):
            if getattr(self, field) < 1:
                raise InvalidConfig(field, getattr(self, field), "it is a number from 1")
        for field in ("body_timeout_s", "request_timeout_s", "slow_client_timeout_s", "keep_alive_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise InvalidConfig("drain_timeout_s", self.drain_timeout_s, "it is a number of seconds from 0")
