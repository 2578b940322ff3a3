"""Messages one way between two tasks of one event loop: the in-process twin of an HTTP/2 stream's window."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc

EOF: Any = grpc.aio.EOF
"""What ``read`` gives at the end, here as on the network."""


class Pipe:
    """Messages in order, at most ``limit`` between writer and reader: the one that is ahead waits for the other."""

    __slots__ = ("_items", "_limit", "_loop", "_reader", "_writer", "closed")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._limit = limit
        self._items: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Any) -> bool:
        """Returns whether the item was taken: False once the pipe is closed."""
        while len(self._items) >= self._limit and not self.closed:
            if self._writer is not None:
                raise grpc.aio.UsageError("another write on this stream is under way")
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self.closed:
            return False
        self._items.append(item)
        _wake(self._reader)
        return True

    async def get(self) -> Any:
        """The next item; EOF where the pipe is closed and empty."""
        while not self._items:
            if self.closed:
                return EOF
            if self._reader is not None:
                raise grpc.aio.UsageError("another read on this stream is under way")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._items.popleft()
        _wake(self._writer)
        return item

    def close(self, *, discard: bool = False) -> None:
        """Takes no more items. Those in it can still be got, unless they are discarded."""
        self.closed = True
        if discard:
            self._items.clear()
        _wake(self._reader)
        _wake(self._writer)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
