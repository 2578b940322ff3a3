"""The call to one gateway: made anew for as long as it may be there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import grpc

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.fabric.current_request import fresh_context
from greenroom.fabric.wire import from_token_run, to_attempt, to_token_run
from greenroom.v1 import tokens_pb2, tokens_pb2_grpc

if TYPE_CHECKING:
    from greenroom.worker.gateways.token_streams import TokenStreams

log = logging.getLogger(__name__)

INSTANCE = "greenroom-instance"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class Stream:
    """One request's stream on a call, by its ``number`` there. ``pending``: tokens that were not sent yet."""

    number: int
    request_id: str
    attempt: Attempt
    link: GatewayLink
    opened: bool = False
    pending: list[Token] = field(default_factory=list)


class _End(Enum):
    """How a call ended."""

    BROKEN = "broken"
    NOT_THERE = "not there"
    """Another instance answers at its address."""
    GONE = "gone"
    IDLE = "idle"


class GatewayLink:
    """The call to one gateway, made anew for as long as it may be there. Owns one task."""

    def __init__(self, instance: str, owner: TokenStreams) -> None:
        self.instance = instance
        self.dirty: dict[int, Stream] = {}
        self._owner = owner
        self._streams: dict[int, Stream] = {}
        self._to_open: list[Stream] = []
        self._numbers = itertools.count(1)
        self._wake = asyncio.Event()
        self._stopping = False
        self._writing_since: float | None = None
        self._asked_at: float | None = None
        """When it was asked to say that it has taken a message in, None where it has said so."""
        self._ask_at = 0.0
        self._answers_asking = False
        self._idle_since: float | None = None
        self._known_at = owner.clock()
        self._unreached = 0
        self._calls = 0
        self._call: _Call | None = None
        self._task = asyncio.create_task(self._run(), name=f"tokens to {instance}", context=fresh_context())
        self._task.add_done_callback(self._over)

    def open(self, request_id: str, attempt: Attempt) -> Stream:
        stream = Stream(next(self._numbers), request_id, attempt, self)
        self._streams[stream.number] = stream
        self._to_open.append(stream)
        self._idle_since = None
        self._wake.set()
        return stream

    def flush(self) -> None:
        self._wake.set()

    def close(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        if not stream.opened and stream in self._to_open:
            self._to_open.remove(stream)

    def take_streams(self) -> list[Stream]:
        """All of them, which are then no longer its."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._to_open.clear()
        self.dirty.clear()
        return streams

    def tick(self) -> None:
        config, now = self._owner.config, self._owner.clock()
        since = self._writing_since if self._asked_at is None or not self._answers_asking else self._asked_at
        if since is not None and now - since > config.slow_gateway_ms:
            self._drop(f"it took nothing for {config.slow_gateway_ms / 1000:g} s")
        elif self.dirty and sum(len(stream.pending) for stream in self.dirty.values()) > config.most_pending:
            self._drop(f"more than {config.most_pending} tokens wait for it")
        if self._streams or self._to_open:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > config.idle_gateway_ms:
            self._owner.retire(self)
            self._stopping = True
            self._wake.set()

    def _drop(self, why: str) -> None:
        if self._call is not None:
            log.warning("gateway %s is too slow, its call is dropped: %s", self.instance, why)
            self._owner.counters.gateways_dropped += 1
            self._writing_since = self._asked_at = None
            self._call.cancel()
            self._call = None

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._wake.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("tokens to gateway %s failed by a defect", self.instance, exc_info=error)
            # Whether it is there nobody knows: they are opened anew, but not at once, lest it fails again at once.
            asyncio.get_running_loop().call_later(_LONGEST_PAUSE_S, self._owner.broken, self.take_streams())

    # -- the task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        end = _End.BROKEN
        try:
            while end is _End.BROKEN and not self._stopping:
                address = self._address()
                if address is not None:
                    began = self._owner.clock()
                    end = await self._deliver(address)
                    if end is not _End.BROKEN:
                        break
                    if self._owner.clock() - began > 1000 * _LONGEST_PAUSE_S:
                        pause = _FIRST_PAUSE_S
                    self._owner.broken(self.take_streams())
                if self._certainly_gone():
                    end = _End.GONE
                    if address is not None:
                        await self._owner.dialer.forget(address)
                else:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            self._owner.retire(self)
        if end in (_End.NOT_THERE, _End.GONE):
            self._owner.gone(self.take_streams())

    def _address(self) -> str | None:
        member = self._owner.members.get(self.instance)
        if member is not None:
            self._known_at = self._owner.clock()
            return member.address
        return None

    def _certainly_gone(self) -> bool:
        """Silence alone is not enough while it can still be reached: the log may be what is silent."""
        members, config = self._owner.members, self._owner.config
        if members.get(self.instance) is None:
            return members.gone(self.instance) or self._owner.clock() - self._known_at > config.unknown_gateway_ms
        return self._unreached > 0 and members.gone(self.instance)

    async def _deliver(self, address: str) -> _End:
        self._calls += 1
        self._asked_at, self._ask_at, self._answers_asking = None, 0.0, False
        self._owner.counters.gateway_calls += 1
        stub = self._owner.dialer.stub(tokens_pb2_grpc.TokensStub, address)
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
            self._call = self._writing_since = self._asked_at = None
            self._wake.set()
            call.cancel()

    async def _messages(self, call: int) -> AsyncIterator[tokens_pb2.FromWorker]:
        """One message a step, with all that has come meanwhile where the gateway takes them in more slowly than that.

        Ends with its call: whoever reads it may not be told at once that the call is over.
        """
        while call == self._calls:
            waiting = self._to_open or self.dirty
            if not waiting or self._overdue():
                if not waiting and self._stopping:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            if self.dirty and not self._owner.listener.may_emit():
                self._mute()
                continue
            message = self._message()
            now = self._writing_since = self._owner.clock()
            if self._asked_at is None and now >= self._ask_at:
                message.ask = True
                self._asked_at, self._ask_at = now, now + self._owner.config.ask_every_ms
            yield message
            if call == self._calls:
                self._writing_since = None

    def _overdue(self) -> bool:
        """Whether the gateway has been asked for too long: it is busy. One that has never answered does not know that
        it is asked."""
        if self._asked_at is None or not self._answers_asking:
            return False
        return self._owner.clock() - self._asked_at > self._owner.config.overdue_ms

    def _mute(self) -> None:
        """The lease ran out before these were sent: when it is renewed the gateway is asked what it has."""
        streams = [stream for stream in self.dirty.values() if self._streams.get(stream.number) is stream]
        self.dirty.clear()
        for stream in streams:
            self._streams.pop(stream.number, None)
        self._owner.broken(streams)

    def _message(self) -> tokens_pb2.FromWorker:
        opening, self._to_open = self._to_open, []
        dirty, self.dirty = self.dirty, {}
        tokens = []
        for stream in dirty.values():
            tokens.append(tokens_pb2.StreamTokens(stream=stream.number, tokens=to_token_run(stream.pending)))
            self._owner.counters.tokens_sent += len(stream.pending)
            stream.pending = []
        self._owner.counters.messages_sent += 1
        return tokens_pb2.FromWorker(
            open=[
                tokens_pb2.OpenStream(
                    stream=stream.number, request_id=stream.request_id, attempt=to_attempt(stream.attempt)
                )
                for stream in opening
            ],
            tokens=tokens,
        )

    def _answers(self, message: tokens_pb2.FromGateway) -> None:
        listener = self._owner.listener
        if message.taken:
            self._asked_at, self._answers_asking = None, True
            self._wake.set()
        for reply in message.replies:
            stream = self._streams.get(reply.stream)
            if stream is None:
                continue  # of one that was closed meanwhile
            match reply.WhichOneof("reply"):
                case "delivered" if not stream.opened:
                    stream.opened = True
                    listener.stream_opened(stream.request_id, stream.attempt, tuple(from_token_run(reply.delivered)))
                case "unwanted" if reply.unwanted.why == tokens_pb2.Unwanted.WHY_NO_STREAM:
                    self._owner.disowned(stream)
                case "unwanted":
                    listener.stream_unwanted(stream.request_id, stream.attempt)
                case "gap":
                    self._owner.broken([stream])
        self._owner.flush()


class _Call(Protocol):
    def cancel(self) -> object: ...
