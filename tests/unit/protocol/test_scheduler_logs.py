"""What a scheduler logs about a request, and what it asks of a worker for it, carries that request's id: no other's."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
import pytest

from greenroom.core.clock import SteadyClock
from greenroom.core.generation import FinishReason, SamplingParams
from greenroom.core.messages import JournalRecord, Member, MemberKind, Message, Outcome, Request, Task, decode, encode
from greenroom.fabric.current_request import request_id
from greenroom.fabric.lifecycle.logs import JsonLines
from greenroom.fabric.log import AppendRefused, AppendUnknown, Headers, MemoryLog, Position
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.rpc import Context, Refused
from greenroom.fabric.topics import DEAD_LETTERS, JOURNAL, TASKS, Topics, all_topics
from greenroom.fabric.wire import to_end_reason
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.scheduler.config import PoolConfig, SchedulerConfig
from greenroom.scheduler.pool_runner import PoolRunner
from greenroom.v1 import worker_pb2, worker_pb2_grpc
from tests.contract.rpc.wires import Wire, until

_BEAT_S = 0.05
HEADERS = (("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
CARRIED = "r-2"
ODD = "r 3 \u00e9"
"""No metadata can carry it."""
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


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the scheduler logs, as JSON."""
    stream, logger = io.StringIO(), logging.getLogger("greenroom.scheduler")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


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


async def test_a_run_that_anothers_end_starts_is_of_its_own_request(wire: Wire, lines: io.StringIO) -> None:
    worker = OneAtATime(CARRIED)
    await wire.serve(worker)  # type: ignore[arg-type]  # any servicer
    async with scheduling(wire, lines) as scheduler:
        for name in ("r-1", CARRIED, ODD):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
    assert {("r-1", "r-1"), (CARRIED, CARRIED), (ODD, "")} == set(worker.runs)
    assert scheduler.ids_of("its call to w broke") == [CARRIED]


async def test_an_outcome_that_is_not_acknowledged_is_of_its_request(wire: Wire, lines: io.StringIO) -> None:
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.unknown = CARRIED
        for name in ("r-1", CARRIED):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
    assert scheduler.ids_of("is not acknowledged") == [CARRIED]


async def test_an_outcome_that_is_too_large_for_the_journal_fails_its_request_once(
    wire: Wire, lines: io.StringIO
) -> None:
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.largest = CARRIED
        for name in ("r-1", CARRIED):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
        async with scheduler.log.reader(JOURNAL, 0) as reader:
            found: list[JournalRecord] = [
                decode(record.value or b"", JournalRecord) for record in await reader.poll(1.0)
            ]
    outcomes = {record.request_id: record for record in found if isinstance(record, Outcome)}
    assert (outcomes["r-1"].reason, outcomes["r-1"].token_ids) == (FinishReason.STOP, (7,))
    failed = outcomes[CARRIED]
    assert (failed.reason, failed.token_ids) == (FinishReason.FAILED, ())
    assert "larger than the journal takes" in failed.message
    assert scheduler.ids_of("the journal refuses a record") == [CARRIED]


async def test_a_dead_letter_is_of_its_request_and_what_comes_after_it_is_not(
    wire: Wire, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.scheduler.dead_letters._AGAIN_S", 0.0)
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    broken = msgspec.msgpack.encode({"v": 9, "kind": "task", "request": {"request_id": CARRIED, "pool": 0}})
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.refuses = True
        await scheduler.feed(broken, HEADERS)
        await scheduler.feed(b"\xc1 of nobody")
        await scheduler.until_all_ended()
        assert [tuple(headers) for headers in await scheduler.letters_carried()] == [HEADERS, HEADERS, ()]
    assert scheduler.ids_of("was not written, trying again") == [CARRIED]
    assert scheduler.ids_of("goes to the dead letters") == [CARRIED, None]


async def test_every_call_names_its_scheduler_and_the_journal_that_its_epoch_is_of(
    wire: Wire, lines: io.StringIO
) -> None:
    worker = OneAtATime()
    await wire.serve(worker)  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        await scheduler.feed(task("r-1"))
        await scheduler.until_all_ended()
        await until(lambda: "CancelRunRequest" in worker.callers, "the run is released")
        journal = await scheduler.log.identity(JOURNAL)
    calls = ("LeaseHello", "ListRunsRequest", "RunRequest", "CancelRunRequest")
    assert worker.callers == {call: {("s/0", journal)} for call in calls}
