"""Tokens on their way to the gateways whose clients wait for them: one call for each gateway, whatever runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.core.messages import Member
from greenroom.fabric.rpc import Dialer
from greenroom.worker.gateways.gateway_link import GatewayLink, Stream
from greenroom.worker.service_config import StreamConfig
from greenroom.worker.service_counters import ServiceCounters


class Members(Protocol):
    """Who is here; fabric's directory."""

    def get(self, instance: str) -> Member | None: ...

    def gone(self, instance: str) -> bool:
        """Certainly: it has left, or was silent for longer than it may be."""
        ...


class StreamListener(Protocol):
    """Told what gateways answer; a run table behind it."""

    def stream_opened(self, request_id: str, attempt: Attempt, delivered: tuple[Token, ...]) -> None: ...

    def stream_unwanted(self, request_id: str, attempt: Attempt) -> None: ...

    def no_stream(self, request_id: str, attempt: Attempt) -> None:
        """Nobody waits for its tokens: it goes on without a stream."""
        ...

    def stream_broken(self, request_id: str, attempt: Attempt) -> None:
        """What was sent may be lost; asks for the stream to be opened anew."""
        ...

    def may_emit(self) -> bool:
        """Whether the lease holds (rule 12)."""
        ...


class TokenStreams:
    """All streams of a worker. Nothing here waits; what gateways answer comes to the listener.

    A gateway that takes its messages too slowly, or has too many tokens to come, loses its call; the runs go on, and
    their streams are opened anew on the next one. A gateway that can not be reached is tried again for as long as it
    is not certain that it has gone.
    """

    def __init__(
        self,
        dialer: Dialer,
        members: Members,
        listener: StreamListener,
        config: StreamConfig,
        counters: ServiceCounters,
        clock: Callable[[], float],
    ) -> None:
        self.dialer = dialer
        self.members = members
        self.listener = listener
        self.config = config
        self.counters = counters
        self.clock = clock
        self._links: dict[str, GatewayLink] = {}
        self._streams: dict[tuple[str, Attempt], Stream] = {}
        self._dirty: set[GatewayLink] = set()
        self._closed = False

    def open(self, request_id: str, attempt: Attempt, reply_to: str | None) -> None:
        """Ask the gateway ``reply_to`` what its client has had."""
        if reply_to is None or self._closed:
            asyncio.get_running_loop().call_soon(self.listener.no_stream, request_id, attempt)
            return
        self.close(request_id, attempt)
        link = self._links.get(reply_to)
        if link is None:
            link = self._links[reply_to] = GatewayLink(reply_to, self)
        self._streams[request_id, attempt] = link.open(request_id, attempt)

    def emit(self, request_id: str, attempt: Attempt, tokens: Sequence[Token]) -> None:
        """Send these with the next ``flush``."""
        stream = self._streams.get((request_id, attempt))
        if stream is not None and stream.opened:
            stream.pending += tokens
            stream.link.dirty[stream.number] = stream
            self._dirty.add(stream.link)

    def flush(self) -> None:
        """A step is over: one message to each gateway that has tokens in it."""
        for link in self._dirty:
            link.flush()
        self._dirty.clear()

    def close(self, request_id: str, attempt: Attempt) -> None:
        """Nothing more is sent of it; what was emitted before still is."""
        stream = self._streams.pop((request_id, attempt), None)
        if stream is not None:
            stream.link.close(stream)

    def tick(self) -> None:
        """Drops calls whose gateways are too slow, and forgets gateways that nothing runs for."""
        for link in list(self._links.values()):
            link.tick()

    def retire(self, link: GatewayLink) -> None:
        """What is opened from now on goes over another link."""
        if self._links.get(link.instance) is link:
            del self._links[link.instance]

    def gone(self, streams: Sequence[Stream]) -> None:
        """It is certain that their gateway is not there any more."""
        self.counters.gateways_gone += 1
        for stream in streams:
            self.disowned(stream)

    def disowned(self, stream: Stream) -> None:
        """Nobody waits for its tokens."""
        if self._streams.get((stream.request_id, stream.attempt)) is stream:
            del self._streams[stream.request_id, stream.attempt]
            stream.link.close(stream)
            self.listener.no_stream(stream.request_id, stream.attempt)

    def broken(self, streams: Sequence[Stream]) -> None:
        """Their call has ended: each is opened anew."""
        for stream in streams:
            key = stream.request_id, stream.attempt
            if self._streams.get(key) is not stream:
                continue
            if stream.opened:
                self.listener.stream_broken(*key)  # and it asks for ``open``
            else:
                self.open(*key, stream.link.instance)

    @property
    def gateways(self) -> int:
        return len(self._links)

    @property
    def pending(self) -> int:
        """Tokens that wait to be sent."""
        return sum(len(stream.pending) for link in self._links.values() for stream in link.dirty.values())

    async def stop(self, timeout_s: float) -> None:
        """Send what waits, for as long as ``timeout_s``, then end all calls."""
        self._closed = True
        self.flush()
        links = list(self._links.values())
        await asyncio.gather(*(link.stop(timeout_s) for link in links))
