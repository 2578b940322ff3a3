"""Tokens from workers: the gateway's end of greenroom.v1.Tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from greenroom.core.attempts import Attempt
from greenroom.fabric.rpc.metadata import Context, received, value_of
from greenroom.fabric.wire import from_token_run, to_token_run
from greenroom.gateway.pipeline.in_flight import InFlightRequests
from greenroom.gateway.pipeline.stream_book import Gap, Unwanted
from greenroom.v1 import tokens_pb2, tokens_pb2_grpc

_LOG = logging.getLogger(__name__)
INSTANCE_KEY = "greenroom-instance"
_WHY = {
    Unwanted.STALE: tokens_pb2.Unwanted.WHY_STALE,
    Unwanted.ENDED: tokens_pb2.Unwanted.WHY_ENDED,
    Unwanted.NO_STREAM: tokens_pb2.Unwanted.WHY_NO_STREAM,
}
_MAX_REPLIES = 4096


class _Stream:
    """One request on one call. The stream book compares it by identity."""

    __slots__ = ("call", "number", "request_id")

    def __init__(self, call: _Call, number: int, request_id: str) -> None:
        self.call = call
        self.number = number
        self.request_id = request_id

    def drop(self) -> bool:
        """Its call takes no more of it. False where that was so already."""
        if self.call.streams.get(self.number) is not self:
            return False
        del self.call.streams[self.number]
        return True


class _Call:
    """One worker's call: its streams by number, and the replies that wait to be written."""

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}
        self.replies: list[tokens_pb2.StreamReply] = []
        self.taken = False
        """Whether the worker asked to be told that its message was taken in, and was not told yet."""
        self.came = asyncio.Event()
        self.done = False

    def reply(self, reply: tokens_pb2.StreamReply) -> None:
        """Raises OverflowError where the worker does not read its replies."""
        if len(self.replies) >= _MAX_REPLIES:
            raise OverflowError("replies are not read")
        self.replies.append(reply)
        self.came.set()


class TokensService(tokens_pb2_grpc.TokensServicer):
    """``instance``: this gateway's. A call for another one is refused, which tells the worker that that one is gone."""

    def __init__(self, instance: str, in_flight: InFlightRequests) -> None:
        self._instance = instance
        self._in_flight = in_flight

    async def Deliver(
        self,
        request_iterator: AsyncIterator[tokens_pb2.FromWorker],
        context: Context,
    ) -> AsyncIterator[tokens_pb2.FromGateway]:
        meant = value_of(received(context), INSTANCE_KEY)
        if meant != self._instance:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this is {self._instance}, not {meant}")
        call = _Call()
        reading = asyncio.create_task(self._read(request_iterator, call), name="tokens of a worker")
        try:
            while True:
                await call.came.wait()
                call.came.clear()
                if call.replies or call.taken:
                    replies, call.replies = call.replies, []
                    taken, call.taken = call.taken, False
                    yield tokens_pb2.FromGateway(replies=replies, taken=taken)
                if call.done and not call.replies:
                    reading.result()
                    return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            call.streams.clear()

    async def _read(self, messages: AsyncIterator[tokens_pb2.FromWorker], call: _Call) -> None:
        try:
            async for message in messages:
                for opening in message.open:
                    self._open(call, opening)
                for tokens in message.tokens:
                    self._add(call, tokens)
                if message.ask:
                    call.taken = True
                    call.came.set()
        finally:
            call.done = True
            call.came.set()

    def _open(self, call: _Call, opening: tokens_pb2.OpenStream) -> None:
        request_id = opening.request_id
        stream = _Stream(call, opening.stream, request_id)
        before = self._stream(request_id)
        had = self._in_flight.book.open(request_id, Attempt(opening.attempt.epoch, opening.attempt.n), stream)
        if isinstance(had, Unwanted):
            call.reply(_unwanted(opening.stream, _WHY[had]))
            return
        if before is not None:
            before.drop()
        call.streams[opening.stream] = stream
        call.reply(tokens_pb2.StreamReply(stream=opening.stream, delivered=to_token_run(had)))

    def _add(self, call: _Call, message: tokens_pb2.StreamTokens) -> None:
        """Called for every step of every request, so a reply is made only where it is sent."""
        stream = call.streams.get(message.stream)
        if stream is None:
            call.reply(_unwanted(message.stream, tokens_pb2.Unwanted.WHY_STALE))
            return
        try:
            new = self._in_flight.add(stream.request_id, stream, from_token_run(message.tokens))
        except (Gap, ValueError) as error:
            _LOG.warning("request %s: %s", stream.request_id, error)
            call.reply(tokens_pb2.StreamReply(stream=message.stream, gap=tokens_pb2.Gap()))
            return
        if isinstance(new, Unwanted):
            del call.streams[message.stream]
            call.reply(_unwanted(message.stream, _WHY[new]))

    def hint_cancel(self, request_id: str) -> None:
        """Tells the worker at once that the request is not wanted, ahead of the cancel that goes the request's own
        way. Call this while the request is in flight."""
        stream = self._stream(request_id)
        if stream is None or not stream.drop():
            return
        try:
            stream.call.reply(_unwanted(stream.number, tokens_pb2.Unwanted.WHY_CANCELLED))
        except OverflowError:
            _LOG.warning("a worker does not read the replies to its tokens")

    def unbind(self, request_id: str) -> None:
        """Takes no more tokens of a request whose outcome has come. Call this while the request is in flight."""
        stream = self._stream(request_id)
        if stream is not None:
            stream.drop()

    def _stream(self, request_id: str) -> _Stream | None:
        found = self._in_flight.book.stream(request_id)
        return found if isinstance(found, _Stream) else None


def _unwanted(stream: int, why: tokens_pb2.Unwanted.Why.ValueType) -> tokens_pb2.StreamReply:
    return tokens_pb2.StreamReply(stream=stream, unwanted=tokens_pb2.Unwanted(why=why))
