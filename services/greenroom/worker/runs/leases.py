"""The worker's right to emit tokens: it asks, a scheduler grants (rule 12)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

import grpc

from greenroom.core.errors import InvalidRequest
from greenroom.fabric.rpc import Refused
from greenroom.v1 import worker_pb2
from greenroom.worker.runs.run_table import RunRefused

_HELLO_S = 10.0
_ASKS_A_LEASE = 4
_SHORTEST_S = 0.01
_LONGEST_S = 0.75
"""The longest time between two requests for a lease, however long the lease: each carries the worker's state."""
_REMEMBERED = 16
"""Requests for a lease that wait for a grant: more than are ever on the way."""


class LeaseHolder(Protocol):
    """The worker that a session gets leases for; a run table behind it."""

    @property
    def instance(self) -> str: ...

    def now(self) -> float:
        """Milliseconds on the worker's own clock."""
        ...

    def meet(self, epoch: int, scheduler: str, journal: str) -> None:
        """A scheduler calls. Raises RunRefused where its epoch is over, or is not known to be its own."""
        ...

    def renew(self, epoch: int, until: float) -> None:
        """Raises RunRefused for an epoch that is over."""
        ...

    async def state(self) -> worker_pb2.WorkerState: ...


class Leases:
    """The sessions of all schedulers. The newest counts: older ones end when it has said hello."""

    def __init__(self, holder: LeaseHolder) -> None:
        self._holder = holder
        self._sessions: list[LeaseSession] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        return bool(self._sessions)

    @property
    def scheduler(self) -> str | None:
        """The scheduler of the newest session."""
        return self._sessions[-1].scheduler if self._sessions else None

    def changed(self) -> None:
        """The worker's state has changed, and the scheduler should know at once."""
        for session in self._sessions:
            session.ask()

    def close(self) -> None:
        """End all sessions, and begin no more."""
        self._closed = True
        for session in self._sessions:
            session.end()

    async def serve(
        self, requests: AsyncIterator[worker_pb2.LeaseFromScheduler]
    ) -> AsyncGenerator[worker_pb2.LeaseFromWorker, None]:
        """One session, from hello to its end. Raises Refused, which tells the scheduler why."""
        if self._closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this worker is stopping", word="stopping")
        session = LeaseSession(self._holder, await self._hello(requests))
        for older in self._sessions:
            older.end()
        self._sessions.append(session)
        try:
            async with contextlib.aclosing(session.asks(requests)) as asks:
                async for message in asks:
                    yield message
        finally:
            self._sessions.remove(session)

    async def _hello(self, requests: AsyncIterator[worker_pb2.LeaseFromScheduler]) -> worker_pb2.LeaseHello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_S:g} s", word="no_hello"
            ) from None
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("a lease begins with hello", param="message")
        hello = first.hello
        check_meant(hello.worker, self._holder.instance)
        meet(self._holder, hello)
        return hello


class LeaseSession:
    """One scheduler's connection."""

    def __init__(self, holder: LeaseHolder, hello: worker_pb2.LeaseHello) -> None:
        self.scheduler = hello.scheduler
        self._journal = hello.journal
        self._holder = holder
        self._lease_ms = hello.lease_ms or math.inf
        self._asked: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._ended = False

    def ask(self) -> None:
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    async def asks(
        self, requests: AsyncIterator[worker_pb2.LeaseFromScheduler]
    ) -> AsyncGenerator[worker_pb2.LeaseFromWorker, None]:
        """Requests for the lease: several within one lease, at least one in 0.75 s, and one whenever ``ask`` is called.
        Until the scheduler hangs up or ``end`` is called."""
        grants = asyncio.create_task(self._grants(requests), name=f"lease grants of {self.scheduler}")
        grants.add_done_callback(lambda task: self.end())
        every = min(max(_SHORTEST_S, self._lease_ms / 1000.0 / _ASKS_A_LEASE), _LONGEST_S)
        sequence = 0
        try:
            while not self._ended:
                self._wake.clear()
                sequence += 1
                self._asked[sequence] = self._holder.now()
                if len(self._asked) > _REMEMBERED:
                    del self._asked[next(iter(self._asked))]
                yield worker_pb2.LeaseFromWorker(sequence=sequence, state=await self._holder.state())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every):
                        await self._wake.wait()
            if grants.done():
                grants.result()
        finally:
            grants.cancel()
            await asyncio.gather(grants, return_exceptions=True)

    async def _grants(self, requests: AsyncIterator[worker_pb2.LeaseFromScheduler]) -> None:
        async for message in requests:
            if not message.HasField("grant"):
                raise InvalidRequest("after hello come grants", param="message")
            asked = self._asked.pop(message.grant.sequence, None)
            if asked is None or self._ended:
                continue  # granted twice, or too late
            try:
                self._holder.meet(message.grant.epoch, self.scheduler, self._journal)
                self._holder.renew(message.grant.epoch, asked + self._lease_ms)
            except RunRefused as refusal:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(refusal), word=EPOCH_OVER) from refusal


EPOCH_OVER = "epoch_over"


def check_meant(worker: str, instance: str) -> None:
    """Raises Refused, NOT_FOUND, where the call is for another worker, which was at this address before."""
    if worker != instance:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"this is {instance}, not {worker}", word="another_instance")


class _FromScheduler(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def scheduler(self) -> str: ...

    @property
    def journal(self) -> str: ...


class _Meets(Protocol):
    def meet(self, epoch: int, scheduler: str, journal: str) -> None: ...


def meet(holder: _Meets, message: _FromScheduler) -> None:
    """Raises Refused, FAILED_PRECONDITION, where the epoch is over, or is not known to be the scheduler's own."""
    try:
        holder.meet(message.epoch, message.scheduler, message.journal)
    except RunRefused as refusal:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(refusal), word=EPOCH_OVER) from refusal
