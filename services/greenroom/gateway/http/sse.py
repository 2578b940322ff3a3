"""Server-sent events to a client that may be slow or gone."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from greenroom.gateway.errors import ApiError, ClientGone

DONE = b"data: [DONE]\n\n"
_NEVER_WAITS_BYTES = 32 * 1024  # a transport asks its writers to wait beyond 64 KiB
_KEEP_ALIVE = b": keep-alive\n\n"


def frame(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.body() + b"\n\n"


class EventStream:
    """One reply in parts. Every write has a deadline: a client that takes nothing for so long is cut off."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        """Raises ClientGone."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.prepare(self._request)
        except TimeoutError:
            drop(self._request)
            raise ClientGone(f"took nothing for {self._timeout_s:g} seconds") from None
        except ConnectionError as error:
            raise ClientGone("closed the connection") from error

    async def send(self, frames: bytes) -> None:
        """Raises ClientGone."""
        try:
            if self._takes(len(frames)):
                await self.response.write(frames)
                return
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(frames)
        except TimeoutError:
            drop(self._request)
            raise ClientGone(f"took nothing for {self._timeout_s:g} seconds") from None
        except ConnectionError as error:
            raise ClientGone("closed the connection") from error

    def _takes(self, size: int) -> bool:
        """Whether the connection takes ``size`` bytes without waiting. Then no deadline is needed."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() + size <= _NEVER_WAITS_BYTES

    async def keep_alive(self) -> None:
        """Sends a comment, which clients ignore."""
        await self.send(_KEEP_ALIVE)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            drop(self._request)
            raise ClientGone("did not take the end of the reply") from error


def drop(request: web.Request) -> None:
    """Closes the connection at once. What is still to be sent is lost."""
    if request.transport is not None:
        request.transport.abort()
