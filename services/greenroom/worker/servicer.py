"""A worker's service as schedulers call it over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from greenroom.core.messages import Task, Undecodable, decode
from greenroom.fabric.rpc import Context
from greenroom.fabric.wire import from_attempt, to_attempt
from greenroom.v1 import worker_pb2, worker_pb2_grpc
from greenroom.worker.runs.leases import check_meant, meet
from greenroom.worker.runs.results import REFUSALS, refused
from greenroom.worker.runs.run_table import RunRefused
from greenroom.worker.service import WorkerService


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """``greenroom.v1.Worker``. A call for another instance ends with NOT_FOUND. A call of an epoch that is over ends
    with FAILED_PRECONDITION."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def Lease(
        self, request_iterator: AsyncIterator[worker_pb2.LeaseFromScheduler], context: Context
    ) -> AsyncIterator[worker_pb2.LeaseFromWorker]:
        async with contextlib.aclosing(self._service.leases.serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def ListRuns(self, request: worker_pb2.ListRunsRequest, context: Context) -> worker_pb2.ListRunsResponse:
        check_meant(request.worker, self._service.instance)
        meet(self._service, request)
        runs = self._service.table.list_runs(request.epoch)
        return worker_pb2.ListRunsResponse(
            runs=[
                worker_pb2.ListedRun(request_id=request_id, attempt=to_attempt(attempt), finished=finished)
                for request_id, attempt, finished in runs
            ]
        )

    async def Run(self, request: worker_pb2.RunRequest, context: Context) -> worker_pb2.RunResponse:
        check_meant(request.worker, self._service.instance)
        meet(self._service, request)
        try:
            task: Task = decode(request.task, Task)
        except Undecodable as error:
            return refused(worker_pb2.RunRefused.WHY_INVALID, f"the task can not be read: {error}")
        try:
            return await self._service.run(request.epoch, from_attempt(request.attempt), task)
        except RunRefused as refusal:
            return refused(REFUSALS[refusal.refusal], str(refusal))

    async def CancelRun(self, request: worker_pb2.CancelRunRequest, context: Context) -> worker_pb2.CancelRunResponse:
        meet(self._service, request)
        self._service.cancel(request.request_id, from_attempt(request.attempt))
        return worker_pb2.CancelRunResponse()
