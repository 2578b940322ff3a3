"""How the front door is set up."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.errors import InvalidConfig
from greenroom.core.hosts import is_loopback
from greenroom.core.units import KIB, MIB
from greenroom.gateway.doors.limits import CANCELS_PER_MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of the front door. Times in seconds. Raises InvalidConfig, naming the field.

    Doors. ``port``, ``grpc_port``: 0 takes a free one; ``grpc_port`` None switches the gRPC API off. ``keys_file``: the
    API keys (``greenroom keys``). None lets everybody in, which is allowed only on this machine's own loopback.
    ``allowed_hosts``: names by which the server may be called (the header ``Host``) beside ``host`` and those of the
    loopback; with keys every name passes unless some are given here. ``allowed_origins``: the origins whose pages may
    read its answers in a browser. ``open_metrics``: /metrics needs no key. ``tls_certificate``, ``tls_key``: PEM files,
    for both ports.

    Limits. ``max_choices``: prompts times ``n`` of one request. ``max_prompt_tokens``, ``max_new_tokens``: of one
    sequence; None leaves it to the model's context. ``max_in_flight``: requests at once, waiting ones included; more
    are answered 429. ``cancels_per_minute``: of one caller, for requests that are not known here; more are answered
    429. ``stream_buffer``: parts of text that wait for one client's connection; beyond them its generation waits.

    Inferences. ``max_infer_body_bytes``: of one call, with its whole batch. ``max_input_bytes``: the inputs of one
    element, which must fit into a record of the topic `requests`. ``max_inputs_held_bytes``: bodies of all calls that
    are being answered; more are answered 429.

    Times. ``request_timeout_s``: for a request that does not set its own. ``max_request_timeout_s``: the longest that a
    request may set. ``slow_client_timeout_s``: a client that takes nothing for so long is cut off. ``keep_alive_s``:
    silence on a stream after which a comment is sent. ``drain_timeout_s``: how long stopping waits for running
    requests; then they are cancelled. ``linger_s``: how long stopping then goes on refusing, within
    ``drain_timeout_s``, so that clients with open connections get an answer; it ends earlier when no connection is
    left.

    Sampling. ``generation_config``: "auto" takes the checkpoint's own defaults (its generation_config.json) where a
    request does not say how to sample, "none" OpenAI's.

    Names. ``system_fingerprint``: of replies; None makes one of the version and the model's name. ``model_root``: the
    field ``root`` of /v1/models; None: the served name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    keys_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    open_metrics: bool = True
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = MIB
    max_choices: int = 128
    max_infer_body_bytes: int = 32 * MIB
    max_input_bytes: int = 4 * MIB - 64 * KIB
    max_inputs_held_bytes: int = 512 * MIB
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_in_flight: int = 1024
    cancels_per_minute: float = CANCELS_PER_MINUTE
    stream_buffer: int = 256
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_request_timeout_s: float = 3600.0
    slow_client_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    drain_timeout_s: float = 30.0
    linger_s: float = 2.0
    generation_config: str = "auto"
    system_fingerprint: str | None = None
    model_root: str | None = None

    def __post_init__(self) -> None:
        try:
            self.host.encode("idna")
        except UnicodeError as error:
            raise InvalidConfig("host", self.host, "no host can have this name") from error
        for field in ("port", "grpc_port"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= 65535:
                raise InvalidConfig(field, value, "it is a number from 0 (a free one) to 65535")
        if self.port and self.port == self.grpc_port:
            raise InvalidConfig(
                "grpc_port", self.grpc_port, "HTTP has that port already; each API takes one of its own"
            )
        for field in (
            "max_body_bytes", "max_choices", "max_prompt_tokens", "max_new_tokens", "max_in_flight", "stream_buffer",
            "max_infer_body_bytes", "max_input_bytes", "max_inputs_held_bytes",
        ):  # fmt: skip
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidConfig(field, value, "it is a number from 1")
        if not 0 < self.cancels_per_minute < math.inf:
            raise InvalidConfig("cancels_per_minute", self.cancels_per_minute, "it is a number above 0")
        for field in (
            "body_timeout_s", "request_timeout_s", "max_request_timeout_s", "slow_client_timeout_s", "keep_alive_s",
        ):  # fmt: skip
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")
        for field in ("drain_timeout_s", "linger_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds from 0")
        if self.generation_config not in ("auto", "none"):
            raise InvalidConfig("generation_config", self.generation_config, "allowed: auto, none")
        if self.request_timeout_s > self.max_request_timeout_s:
            allowed = f"it is at most max_request_timeout_s, {self.max_request_timeout_s:g}"
            raise InvalidConfig("request_timeout_s", self.request_timeout_s, allowed)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidConfig("tls_key", str(self.tls_key), "a certificate and its key come together")
        if self.keys_file is None and not self.on_loopback:
            raise InvalidConfig(
                "host",
                self.host,
                "without API keys it is 127.0.0.1, ::1 or localhost; make a key with `greenroom keys add NAME` and "
                "start with --keys-file",
            )

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return self.tls_certificate, self.tls_key

    def tls_context(self) -> ssl.SSLContext | None:
        """For the HTTP listener, None without a certificate. Reads the files. Raises InvalidConfig where they can not
        be used."""
        if self.tls is None:
            return None
        certificate, key = self.tls
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # SSLError too
            raise InvalidConfig(
                "tls_certificate", str(certificate), f"it can not be used with the key {key}: {error}"
            ) from error
        return context
