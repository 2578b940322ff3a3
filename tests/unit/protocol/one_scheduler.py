"""A scheduler of one pool on a log in memory, with a worker that runs one request at a time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec

from greenroom.core.clock import SteadyClock
from greenroom.core.generation import FinishReason, SamplingParams
from greenroom.core.messages import JournalRecord, Member, MemberKind, Message, Outcome, Request, Task, decode, encode
from greenroom.fabric.current_request import request_id
from greenroom.fabric.log import AppendRefused, AppendUnknown, Headers, MemoryLog, Position
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.rpc import Context, Refused
from greenroom.fabric.topics import DEAD_LETTERS, JOURNAL, TASKS, Topics, all_topics
from greenroom.fabric.wire import to_end_reason
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.scheduler.config import PoolConfig, SchedulerConfig
from greenroom.scheduler.pool_runner import PoolRunner
from greenroom.v1 import worker_pb2, worker_pb2_grpc
from tests.contract.rpc.wires import Wire
from tests.waiting import until

_BEAT_S = 0.05
HEADERS = (("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
Called = worker_pb2.LeaseHello | worker_pb2.ListRunsRequest | worker_pb2.RunRequest | worker_pb2.CancelRunRequest


class OneAtATime(worker_pb2_grpc.WorkerServicer):
    """Runs one request at a time. ``break_on``: whose first call it breaks. ``runs``: of which request each call was,
    and which id came along with it. ``callers``: by call, which schedulers and journals named themselves."""

    def __init__(self, *break_on: str) -> None:
        self.runs: list[tuple[str, str]] = []
        self.callers: dict[str, set[tuple[str, str]]] = {}
        self._break_on = set(break_on)

    async def Lease(
        self, request_iterator: AsyncIterator[worker_pb2.LeaseFromScheduler], context: Context
    ) -> AsyncIterator[worker_pb2.LeaseFromWorker]:
        state = worker_pb2.WorkerState(worker="w", max_running=1, kv_tokens=1000)
        async for message in request_iterator:
            if message.HasField("hello"):
                self._called(message.hello)
            yield worker_pb2.LeaseFromWorker(sequence=1, state=state)
            await asyncio.sleep(_BEAT_S)

    def _called(self, message: Called) -> None:
        self.callers.setdefault(type(message).__name__, set()).add((message.scheduler, message.journal))

    async def ListRuns(self, request: worker_pb2.ListRunsRequest, context: Context) -> worker_pb2.ListRunsResponse:
        self._called(request)
        return worker_pb2.ListRunsResponse()

    async def Run(self, request: worker_pb2.RunRequest, context: Context) -> worker_pb2.RunResponse:
        self._called(request)
        asked = msgspec.msgpack.decode(request.task)["request"]["request_id"]
        self.runs.append((asked, request_id.get()))
        if asked in self._break_on:
            self._break_on.discard(asked)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "broken", word="broken")
        result = worker_pb2.RunResult(reason=to_end_reason(FinishReason.STOP), prompt_tokens=1, token_ids=[7])
        return worker_pb2.RunResponse(result=result)

    async def CancelRun(self, request: worker_pb2.CancelRunRequest, context: Context) -> worker_pb2.CancelRunResponse:
        self._called(request)
        return worker_pb2.CancelRunResponse()


class Troubled(MemoryLog):
    """Loses the acknowledgement of the first outcome of ``unknown``, and says of the first dead letter, though it has
    it, that it was refused."""

    unknown = ""
    refuses = False
    largest = ""
    """Whose outcome with tokens it takes for too large."""

    async def append(self, topic: str, value: bytes | None, **how: Any) -> Position:
        if topic == JOURNAL and self.largest and how["key"] == self.largest.encode():
            record: JournalRecord = decode(value or b"", JournalRecord)
            if isinstance(record, Outcome) and record.token_ids:
                raise AppendRefused("too large")
        position = await super().append(topic, value, **how)
        if topic == JOURNAL and self.unknown and how["key"] == self.unknown.encode():
            self.unknown = ""
            raise AppendUnknown("lost on its way")
        if topic == DEAD_LETTERS and self.refuses:
            self.refuses = False
            raise AppendRefused("refused")
        return position


@dataclass
class Scheduler:
    runner: PoolRunner
    log: Troubled
    fed: int = 0
    stream: io.StringIO = field(default_factory=io.StringIO)

    async def feed(self, message: Message | bytes, headers: Headers = ()) -> None:
        value = message if isinstance(message, bytes) else encode(message)
        position = await self.log.append(TASKS, value, partition=0, headers=headers)
        async with self.log.reader(TASKS, 0, start=position.offset) as reader:
            self.runner.feed((await reader.poll(1.0))[0])
        self.fed += 1

    async def until_all_ended(self) -> None:
        await until(lambda: self.runner.position == self.fed, "all that was read has ended")

    async def letters_carried(self) -> list[Headers]:
        """The headers of all dead letters."""
        async with self.log.reader(DEAD_LETTERS, 0) as reader:
            end = await reader.end()
            found: list[Headers] = []
            while reader.position < end:
                found += [record.headers for record in await reader.poll(1.0)]
        return found

    def ids_of(self, text: str) -> list[str | None]:
        """Of the lines in which ``text`` occurs."""
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line.get("request_id") for line in lines if text in line["message"]]


@asynccontextmanager
async def scheduling(wire: Wire, stream: io.StringIO) -> AsyncIterator[Scheduler]:
    async with Troubled() as log:
        await log.ensure(all_topics(Topics()))
        worker = Member(member=MemberKind.WORKER, instance="w", address=wire.address, ttl_ms=60_000)
        announcer = Announcer(log, lambda: worker)
        async with Directory(log, look_s=0.01) as directory:
            await announcer.start()
            runner = PoolRunner(
                0,
                0,
                instance="s",
                config=SchedulerConfig(pool=PoolConfig(lease_ms=1000, reclaim_ms=1000)),
                policy=FcfsPlacement(),
                log=log,
                dialer=wire.dialer,
                directory=directory,
                clock=SteadyClock(),
            )
            running = asyncio.create_task(runner.run())
            try:
                await until(lambda: any(worker.listed for worker in runner.pool.workers.values()), "it has the worker")
                yield Scheduler(runner, log, stream=stream)
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
                await announcer.stop()


def task(request: str) -> Task:
    return Task(
        request=Request(
            request_id=request,
            pool=0,
            model="m",
            prompt_ids=(1,),
            sampling=SamplingParams(max_tokens=1),
            accepted_ms=int(SteadyClock()()),
            deadline_ms=2**42,
        ),
        task_type="t",
    )
