"""What every transport does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom_load.prompts import Ask
from greenroom_load.reply_record import Exchange, clock
from greenroom_load.targets import Targets

SendSlo = Literal["headers", "fields"]
_PROBE_EVERY_S = 0.25


class NotReady(GreenroomError):
    """The server did not say in time that it takes requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What is the same in all requests of a run.

    ``send_slo``: how a request's targets are told to the server, None: not at all. ``send_task_type``: its task type
    too. ``extra``: further fields of HTTP bodies. ``api_key`` and ``headers`` never get into reports. ``ca_file``: PEM
    certificates by which the server's is judged instead of the system's.
    """

    api: Literal["chat", "completions"] = "chat"
    temperature: float | None = 0.0
    ignore_eos: bool = False
    send_slo: SendSlo | None = None
    send_task_type: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise InvalidConfig("temperature", self.temperature, "a number from 0 to 2")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that only has to be sent: ``payload`` is the transport's own."""

    payload: Any
    headers: tuple[tuple[str, str], ...]


class Transport(Protocol):
    """A server, and how to talk to it. ``open`` first, ``close`` at the end, in one event loop."""

    @property
    def kind(self) -> str:
        """For reports: ``openai-chat``, ``openai``, ``greenroom-grpc``."""
        ...

    @property
    def address(self) -> str: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server says that it takes requests. Raises NotReady, with what it said last."""
        ...

    async def model(self) -> str:
        """The name of the model that the server has; the first, if several. Raises NotReady."""
        ...

    def prepare(self, ask: Ask, model: str, request_id: str) -> Prepared: ...

    async def send(self, prepared: Prepared, exchange: Exchange) -> None:
        """Sends it and tells ``exchange`` what comes back, to the end. Raises Refused where it does not end well;
        cancelling it gives the request up."""
        ...


async def until_ready(address: str, health: Callable[[], Awaitable[str | None]], timeout_s: float) -> None:
    """Asks ``health`` again and again until it says None: the server takes requests. Raises NotReady, with what it said
    last."""
    deadline = clock() + timeout_s
    while True:
        said = await health()
        if said is None:
            return
        if clock() + _PROBE_EVERY_S > deadline:
            raise NotReady(
                f"{address} was not ready within {timeout_s:g} s: {said}; "
                f"start the server, or give --url or a longer --ready-timeout"
            )
        await asyncio.sleep(_PROBE_EVERY_S)


def slo_headers(targets: Targets) -> list[tuple[str, str]]:
    """``x-slo-ttft-ms`` and so on, in decimals without an exponent."""
    return [
        (f"x-slo-{name.replace('_', '-')}", f"{value:.6f}".rstrip("0").rstrip("."))
        for name, value in targets.given.items()
    ]
