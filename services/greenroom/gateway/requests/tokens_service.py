"""Tokens from workers: the gateway's end of greenroom.v1.Tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from greenroom.core.attempts import Attempt
from greenroom.fabric.rpc.metadata import Context, received, value_of
from greenroom.fabric.wire import from_token_run, to_token_run
from greenroom.gateway.requests.in_flight import Flights
from greenroom.gateway.requests.stream_book import Gap, Unwanted
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
    """One request on one call. The book knows it by identity."""

    __slots__ = ("call", "number", "request_id")

    def __init__(self, call: _Call, number: int, request_id: str) -> None:
        self.call = call
        self.number = number
        self.request_id = request_id


class _Call:
    """One worker's call: its streams by number, and the replies that wait to be written."""

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}
        self.replies: list[tokens_pb2.StreamReply] = []
        self.taken = False
        """Whether it is to be said that what was asked for is taken in."""
        self.came = asyncio.Event()
        self.done = False

    def reply(self, reply: tokens_pb2.StreamReply) -> None:
        """Raises OverflowError where the worker reads none."""
        if len(self.replies) >= _MAX_REPLIES:
            raise OverflowError("replies are not read")
        self.replies.append(reply)
        self.came.set()


class TokensService(tokens_pb2_grpc.TokensServicer):
    """``instance``: this gateway's; calls that mean another are refused, which tells the worker that it is gone."""

    def __init__(self, instance: str, flights: Flights) -> None:
        self._instance = instance
        self._flights = flights
        self._bound: dict[str, _Stream] = {}

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
            for stream in call.streams.values():
                if self._bound.get(stream.request_id) is stream:
                    del self._bound[stream.request_id]

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
        had = self._flights.book.open(request_id, Attempt(opening.attempt.epoch, opening.attempt.n), stream)
        if isinstance(had, Unwanted):
            call.reply(_unwanted(opening.stream, _WHY[had]))
            return
        call.streams[opening.stream] = stream
        before = self._bound.get(request_id)
        if before is not None:
            before.call.streams.pop(before.number, None)
        self._bound[request_id] = stream
        call.reply(tokens_pb2.StreamReply(stream=opening.stream, delivered=to_token_run(had)))

    def _add(self, call: _Call, message: tokens_pb2.StreamTokens) -> None:
        """Done for every step of every request: no reply is made where none is sent."""
        stream = call.streams.get(message.stream)
        if stream is None:
            call.reply(_unwanted(message.stream, tokens_pb2.Unwanted.WHY_STALE))
            return
        try:
            new = self._flights.book.add(stream.request_id, stream, from_token_run(message.tokens))
        except (Gap, ValueError) as error:
            _LOG.warning("request %s: %s", stream.request_id, error)
            call.reply(tokens_pb2.StreamReply(stream=message.stream, gap=tokens_pb2.Gap()))
            return
        if isinstance(new, Unwanted):
            del call.streams[message.stream]
            if self._bound.get(stream.request_id) is stream:
                del self._bound[stream.request_id]
            call.reply(_unwanted(message.stream, _WHY[new]))
        elif new:
            self._flights.delivered(stream.request_id, new)

    def hint_cancel(self, request_id: str) -> None:
        """Its client has gone: tell the worker at once, ahead of the cancel that goes the request's own way."""
        stream = self._bound.pop(request_id, None)
        if stream is None:
            return
        stream.call.streams.pop(stream.number, None)
        try:
            stream.call.reply(_unwanted(stream.number, tokens_pb2.Unwanted.WHY_CANCELLED))
        except OverflowError:
            _LOG.warning("a worker does not read the replies to its tokens")

    def ended(self, request_id: str) -> None:
        """Its outcome is known: nothing more of it is taken."""
        stream = self._bound.pop(request_id, None)
        if stream is not None:
            stream.call.streams.pop(stream.number, None)


def _unwanted(stream: int, why: tokens_pb2.Unwanted.Why.ValueType) -> tokens_pb2.StreamReply:
    return tokens_pb2.StreamReply(stream=stream, unwanted=tokens_pb2.Unwanted(why=why))
