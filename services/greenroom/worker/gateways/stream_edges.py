"""What the token streams of a worker stand on: who is there, who hears what gateways answer, the way to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.core.messages import Member
from greenroom.fabric.rpc import Dialer
from greenroom.worker.service_config import StreamConfig
from greenroom.worker.service_counters import ServiceCounters

StreamKey = tuple[str, Attempt]


class Members(Protocol):
    """The instances that are here; fabric's directory."""

    def get(self, instance: str) -> Member | None: ...

    def gone(self, instance: str) -> bool:
        """Certainly: it has left, or was silent for longer than it may be."""
        ...


class StreamListener(Protocol):
    """Told what gateways answer; a run table behind it."""

    def stream_opened(self, request_id: str, attempt: Attempt, delivered: tuple[Token, ...]) -> None: ...

    def stream_unwanted(self, request_id: str, attempt: Attempt) -> None: ...

    def no_stream(self, request_id: str, attempt: Attempt) -> None:
        """No client waits for its tokens: it goes on without a stream."""
        ...

    def stream_broken(self, request_id: str, attempt: Attempt) -> None:
        """What was sent may be lost; asks for the stream to be opened anew."""
        ...

    def may_emit(self) -> bool:
        """Whether the lease holds (rule 12)."""
        ...


@dataclass(frozen=True, slots=True)
class StreamEdges:
    """What the streams of a worker share: the way to gateways, who hears their answers, figures."""

    dialer: Dialer
    members: Members
    listener: StreamListener
    config: StreamConfig
    counters: ServiceCounters
    clock: Callable[[], float]
