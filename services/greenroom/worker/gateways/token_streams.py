"""Tokens on their way to the gateways whose clients wait for them: one connection for each gateway, whatever runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.worker.gateways.gateway_connection import GatewayConnection
from greenroom.worker.gateways.stream_edges import StreamEdges, StreamKey


class TokenStreams:
    """All streams of a worker. Nothing here waits; what gateways answer comes to the listener.

    A gateway that takes its messages too slowly, or has too many tokens to come, loses its call. The runs go on, and
    their streams are opened anew on the next call. A gateway that can not be reached is tried again for as long as it
    is not certain that it has gone.
    """

    def __init__(self, edges: StreamEdges) -> None:
        self._edges = edges
        self._connections: dict[str, GatewayConnection] = {}
        self._ending: set[GatewayConnection] = set()
        """Those that take no more streams and are not over yet. Another one to the same gateway may be there."""
        self._streams: dict[StreamKey, GatewayConnection] = {}
        self._unflushed: set[GatewayConnection] = set()
        self._closed = False

    def open(self, request_id: str, attempt: Attempt, reply_to: str | None) -> None:
        """Ask the gateway ``reply_to`` what its client has had."""
        if reply_to is None or self._closed:
            asyncio.get_running_loop().call_soon(self._edges.listener.no_stream, request_id, attempt)
            return
        self.close(request_id, attempt)
        connection = self._connections.get(reply_to)
        if connection is not None and connection.ended:
            self._set_aside(connection)
            connection = None
        if connection is None:
            connection = self._connections[reply_to] = GatewayConnection(reply_to, self._edges)
        self._streams[request_id, attempt] = connection
        connection.open((request_id, attempt))

    def emit(self, request_id: str, attempt: Attempt, tokens: Sequence[Token]) -> None:
        """Send these with the next ``flush``."""
        connection = self._streams.get((request_id, attempt))
        if connection is not None and connection.emit((request_id, attempt), tokens):
            self._unflushed.add(connection)

    def flush(self) -> None:
        """A step is over: one message to each gateway that has tokens in it."""
        for connection in self._unflushed:
            connection.flush()
        self._unflushed.clear()

    def close(self, request_id: str, attempt: Attempt) -> None:
        """Nothing more is sent of it; what was emitted before still is."""
        connection = self._streams.pop((request_id, attempt), None)
        if connection is not None:
            connection.close((request_id, attempt))

    def tick(self) -> None:
        """Drops calls whose gateways are too slow, and forgets gateways that nothing runs for."""
        for connection in self._all():
            connection.tick()
            if connection.ended and connection not in self._ending:
                self._set_aside(connection)
            if connection.over:
                self._ending.discard(connection)

    def _set_aside(self, connection: GatewayConnection) -> None:
        del self._connections[connection.instance]
        self._ending.add(connection)

    def _all(self) -> list[GatewayConnection]:
        return [*self._connections.values(), *self._ending]

    @property
    def gateways(self) -> int:
        return sum(not connection.ended for connection in self._connections.values())

    @property
    def ending(self) -> int:
        """Connections that take no more streams and whose gateways have not ended them yet."""
        return sum(connection.ended and not connection.over for connection in self._all())

    @property
    def pending(self) -> int:
        """Tokens that wait to be sent."""
        return sum(connection.pending for connection in self._all())

    async def stop(self, timeout_s: float) -> None:
        """Send what waits, for as long as ``timeout_s``, then end all calls."""
        self._closed = True
        self.flush()
        await asyncio.gather(*(connection.stop(timeout_s) for connection in self._all()))
