"""The token streams of one gateway, on one call that is made anew for as long as the gateway may be there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import grpc

from greenroom.core.generation import Token
from greenroom.fabric.current_request import fresh_context
from greenroom.fabric.wire import from_token_run, to_attempt, to_token_run
from greenroom.v1 import tokens_pb2, tokens_pb2_grpc
from greenroom.worker.gateways.flow_control import FlowControl
from greenroom.worker.gateways.stream_edges import StreamEdges, StreamKey

log = logging.getLogger(__name__)

INSTANCE = "greenroom-instance"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class _Stream:
    """One request's stream, by its ``number`` on the call. ``pending``: tokens that were not sent yet."""

    number: int
    key: StreamKey
    opened: bool = False
    pending: list[Token] = field(default_factory=list)


class _End(Enum):
    """How a call ended."""

    BROKEN = "broken"
    NOT_THERE = "not there"
    """Another instance answers at its address."""
    GONE = "gone"
    IDLE = "idle"


class GatewayConnection:
    """One gateway: ``open`` asks it what a client has had, ``emit`` and ``flush`` send tokens, ``pending`` wait.

    Owns one task, until it is ``over``. From ``ended`` on, a little earlier, streams need another connection. A call
    that breaks is made anew, and the listener is asked to open its streams again. A gateway that does not end an idle
    call is not waited for longer than for one that takes nothing.
    """

    def __init__(self, instance: str, edges: StreamEdges) -> None:
        self.instance = instance
        self.ended = False
        self._edges = edges
        self._streams: dict[StreamKey, _Stream] = {}
        self._by_number: dict[int, _Stream] = {}
        self._dirty: dict[int, _Stream] = {}
        self._to_open: list[_Stream] = []
        self._numbers = itertools.count(1)
        self._wake = asyncio.Event()
        self._stopping = False
        self._flow = FlowControl(edges.config)
        self._idle_since: float | None = None
        self._ending_since: float | None = None
        self._known_at = edges.clock()
        self._unreached = 0
        self._calls = 0
        self._call: _Call | None = None
        self._task = asyncio.create_task(self._run(), name=f"tokens to {instance}", context=fresh_context())
        self._task.add_done_callback(self._over)

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def pending(self) -> int:
        """Tokens that wait to be sent."""
        return sum(len(stream.pending) for stream in self._dirty.values())

    def open(self, key: StreamKey) -> None:
        """Ask the gateway what the request's client has had."""
        stream = self._streams[key] = _Stream(next(self._numbers), key)
        self._by_number[stream.number] = stream
        self._to_open.append(stream)
        self._idle_since = None
        self._wake.set()

    def emit(self, key: StreamKey, tokens: Sequence[Token]) -> bool:
        """Send these with the next ``flush``. Whether the stream is open: else they are passed over."""
        stream = self._streams.get(key)
        if stream is None or not stream.opened:
            return False
        stream.pending += tokens
        self._dirty[stream.number] = stream
        return True

    def flush(self) -> None:
        """A step is over: one message with all that it gave."""
        self._wake.set()

    def close(self, key: StreamKey) -> None:
        """Nothing more is sent of it; what was emitted before still is."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            del self._by_number[stream.number]
            if not stream.opened and stream in self._to_open:
                self._to_open.remove(stream)

    def tick(self) -> None:
        """Drop a call whose gateway is too slow; end where nothing has run for the gateway for long."""
        config, now = self._edges.config, self._edges.clock()
        if self._flow.stuck(now):
            self._drop(f"it took nothing for {config.slow_gateway_ms / 1000:g} s")
        elif self._dirty and self.pending > config.most_pending:
            self._drop(f"more than {config.most_pending} tokens wait for it")
        if self._ending_since is not None:
            if now - self._ending_since > config.slow_gateway_ms:
                self._give_up(f"it did not end its idle call for {config.slow_gateway_ms / 1000:g} s")
        elif self._streams:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > config.idle_gateway_ms:
            self.ended = self._stopping = True
            self._ending_since = now
            self._wake.set()

    def _give_up(self, why: str) -> None:
        if not self._task.cancelling():
            log.warning("gateway %s is too slow, its call is dropped: %s", self.instance, why)
            self._edges.counters.gateways_dropped += 1
            self._task.cancel()

    def _drop(self, why: str) -> None:
        if self._call is not None:
            log.warning("gateway %s is too slow, its call is dropped: %s", self.instance, why)
            self._edges.counters.gateways_dropped += 1
            self._flow.end()
            self._call.cancel()
            self._call = None

    async def stop(self, timeout_s: float) -> None:
        """Send what waits, for as long as ``timeout_s``, then end the call."""
        self._stopping = True
        self._wake.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.ended = True
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("tokens to gateway %s failed by a defect", self.instance, exc_info=error)
            # Whether the gateway is there is not known. The streams are opened anew, but not at once, lest the same
            # defect comes at once.
            asyncio.get_running_loop().call_later(_LONGEST_PAUSE_S, self._break_all)

    # -- the ends of streams -------------------------------------------------------------------------------------

    def _break(self, streams: Sequence[_Stream]) -> None:
        """What was sent of these may be lost: the listener opens each anew."""
        for stream in streams:
            if self._streams.get(stream.key) is stream:
                self.close(stream.key)
                self._edges.listener.stream_broken(*stream.key)

    def _break_all(self) -> None:
        self._dirty.clear()
        self._break(list(self._streams.values()))

    def _disown(self, streams: Sequence[_Stream]) -> None:
        """No client waits for the tokens of these."""
        for stream in streams:
            if self._streams.get(stream.key) is stream:
                self.close(stream.key)
                self._edges.listener.no_stream(*stream.key)

    # -- the task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        end = _End.BROKEN
        try:
            while end is _End.BROKEN and not self._stopping:
                address = self._address()
                if address is not None:
                    began = self._edges.clock()
                    end = await self._deliver(address)
                    if end is not _End.BROKEN:
                        break
                    if self._edges.clock() - began > 1000 * _LONGEST_PAUSE_S:
                        pause = _FIRST_PAUSE_S
                    self._break_all()
                if self._certainly_gone():
                    end = _End.GONE
                    if address is not None:
                        await self._edges.dialer.forget(address)
                else:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            self.ended = True
        if end in (_End.NOT_THERE, _End.GONE):
            self._edges.counters.gateways_gone += 1
            self._dirty.clear()
            self._disown(list(self._streams.values()))

    def _address(self) -> str | None:
        member = self._edges.members.get(self.instance)
        if member is not None:
            self._known_at = self._edges.clock()
            return member.address
        return None

    def _certainly_gone(self) -> bool:
        """Silence alone is not enough while it can still be reached: the log may be what is silent."""
        members, config = self._edges.members, self._edges.config
        if members.get(self.instance) is None:
            return members.gone(self.instance) or self._edges.clock() - self._known_at > config.unknown_gateway_ms
        return self._unreached > 0 and members.gone(self.instance)

    async def _deliver(self, address: str) -> _End:
        self._calls += 1
        self._flow.begin()
        self._edges.counters.gateway_calls += 1
        stub = self._edges.dialer.stub(tokens_pb2_grpc.TokensStub, address)
        call = self._call = stub.Deliver(self._messages(self._calls), metadata=((INSTANCE, self.instance),))
        try:
            async for reply in call:
                self._unreached = 0
                self._answers(reply)
            return _End.IDLE if self._stopping else _End.BROKEN
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _End.BROKEN  # the call was dropped, not this task
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return _End.NOT_THERE
            self._unreached += 1
            level = logging.INFO if self._unreached == 1 else logging.DEBUG
            log.log(level, "gateway %s: %s %s", self.instance, error.code().name, error.details())
            return _End.BROKEN
        except Exception:
            log.exception("the call to gateway %s failed by a defect", self.instance)
            return _End.BROKEN
        finally:
            self._calls += 1
            self._call = None
            self._flow.end()
            self._wake.set()
            call.cancel()

    async def _messages(self, call: int) -> AsyncIterator[tokens_pb2.FromWorker]:
        """One message a step. A gateway that takes them in more slowly gets all that has come meanwhile in one.

        Ends with its call: whoever reads it may not be told at once that the call is over.
        """
        while call == self._calls:
            waiting = self._to_open or self._dirty
            if not waiting or self._flow.overdue(self._edges.clock()):
                if not waiting and self._stopping:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            if self._dirty and not self._edges.listener.may_emit():
                self._mute()
                continue
            message = self._message()
            if self._flow.writing(self._edges.clock()):
                message.ask = True
            yield message
            if call == self._calls:
                self._flow.written()

    def _mute(self) -> None:
        """The lease ran out before these were sent: when it is renewed the gateway is asked what it has."""
        streams = list(self._dirty.values())
        self._dirty.clear()
        self._break(streams)

    def _message(self) -> tokens_pb2.FromWorker:
        opening, self._to_open = self._to_open, []
        dirty, self._dirty = self._dirty, {}
        tokens = []
        for stream in dirty.values():
            tokens.append(tokens_pb2.StreamTokens(stream=stream.number, tokens=to_token_run(stream.pending)))
            self._edges.counters.tokens_sent += len(stream.pending)
            stream.pending = []
        self._edges.counters.messages_sent += 1
        return tokens_pb2.FromWorker(
            open=[
                tokens_pb2.OpenStream(stream=stream.number, request_id=stream.key[0], attempt=to_attempt(stream.key[1]))
                for stream in opening
            ],
            tokens=tokens,
        )

    def _answers(self, message: tokens_pb2.FromGateway) -> None:
        listener = self._edges.listener
        if message.taken:
            self._flow.taken()
        for reply in message.replies:
            stream = self._by_number.get(reply.stream)
            if stream is None:
                continue  # closed meanwhile
            match reply.WhichOneof("reply"):
                case "delivered" if not stream.opened:
                    stream.opened = True
                    listener.stream_opened(*stream.key, tuple(from_token_run(reply.delivered)))
                case "unwanted" if reply.unwanted.why == tokens_pb2.Unwanted.WHY_NO_STREAM:
                    self._disown([stream])
                case "unwanted":
                    listener.stream_unwanted(*stream.key)
                case "gap":
                    self._break([stream])
        self._wake.set()


class _Call(Protocol):
    def cancel(self) -> object: ...
