"""The scheduler's lease streams, on both wires: granted again and again, and nothing is left of those that broke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.rpc import Context, Refused
from greenroom.scheduler.trace_contexts import TraceContexts
from greenroom.scheduler.worker_calls import WorkerCalls
from greenroom.v1 import worker_pb2, worker_pb2_grpc
from tests.contract.rpc.wires import Wire
from tests.unit.protocol.pool_bench import Bench
from tests.waiting import until


class Leasing(worker_pb2_grpc.WorkerServicer):
    """Asks for the lease once a call, and then ends the call."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    async def Lease(
        self, request_iterator: AsyncIterator[worker_pb2.LeaseFromScheduler], context: Context
    ) -> AsyncIterator[worker_pb2.LeaseFromWorker]:
        requests = aiter(request_iterator)
        self.heard.append((await anext(requests)).WhichOneof("message"))
        state = worker_pb2.WorkerState(worker="w", max_running=2, kv_tokens=1000)
        yield worker_pb2.LeaseFromWorker(sequence=1, state=state)
        self.heard.append((await anext(requests)).WhichOneof("message"))

    async def ListRuns(self, request: worker_pb2.ListRunsRequest, context: Context) -> worker_pb2.ListRunsResponse:
        return worker_pb2.ListRunsResponse()

    async def Run(self, request: worker_pb2.RunRequest, context: Context) -> worker_pb2.RunResponse:
        raise NotImplementedError

    async def CancelRun(self, request: worker_pb2.CancelRunRequest, context: Context) -> worker_pb2.CancelRunResponse:
        raise NotImplementedError


async def test_a_stream_that_ends_is_made_anew_and_leaves_nothing_behind(wire: Wire) -> None:
    worker, bench = Leasing(), Bench()
    await wire.serve(worker)  # type: ignore[arg-type]  # any servicer
    workers = WorkerCalls(bench.pool, TraceContexts(bench.pool), wire.dialer, lambda: bench.now, lambda effects: None)
    workers.meet(Member(member=MemberKind.WORKER, instance="w", address=wire.address, ttl_ms=6_000))
    await until(lambda: len(worker.heard) >= 6, "three streams were granted")
    assert worker.heard[:6] == ["hello", "grant"] * 3
    await workers.close()
    await until(
        lambda: not [task for task in asyncio.all_tasks() if "request_iterator" in repr(task)], "no task is left"
    )


class Refusing(Leasing):
    """Grants nothing: it serves another scheduler. ``granting`` once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.granting = False

    async def Lease(
        self, request_iterator: AsyncIterator[worker_pb2.LeaseFromScheduler], context: Context
    ) -> AsyncIterator[worker_pb2.LeaseFromWorker]:
        self.calls += 1
        if not self.granting:
            if self.calls % 2:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {self.calls} is over", word="epoch_over")
            raise Refused(grpc.StatusCode.INTERNAL, f"call {self.calls} failed", word="failed")
        async for message in super().Lease(request_iterator, context):
            yield message


async def test_a_refused_lease_is_logged_once_a_code_until_there_is_one_again(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="greenroom.scheduler")
    worker, bench = Refusing(), Bench()
    await wire.serve(worker)  # type: ignore[arg-type]  # any servicer
    workers = WorkerCalls(bench.pool, TraceContexts(bench.pool), wire.dialer, lambda: bench.now, lambda effects: None)
    workers.meet(Member(member=MemberKind.WORKER, instance="w", address=wire.address, ttl_ms=6_000))
    await until(lambda: worker.calls >= 5, "it was refused again and again, with another text each time")
    assert caplog.messages == [
        "no lease with w, trying again: FAILED_PRECONDITION epoch 1 is over",
        "no lease with w, trying again: INTERNAL call 2 failed",
    ]
    worker.granting = True
    await until(lambda: "grant" in worker.heard, "it has a lease")
    worker.granting = False
    await until(lambda: len(caplog.messages) == 4, "it was refused anew")
    await workers.close()
