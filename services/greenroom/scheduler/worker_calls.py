"""A pool's workers over RPC: their leases, what they run, and runs on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import msgspec

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.messages import Member, Task, encode
from greenroom.fabric.current_request import fresh_context
from greenroom.fabric.rpc import Dialer, outgoing, word_of
from greenroom.fabric.wire import (
    from_attempt,
    from_end_reason,
    from_share,
    logprobs_of,
    outputs_of,
    prompt_logprobs_of,
    to_attempt,
)
from greenroom.policies.base.answer_lengths import MOST_TASKS
from greenroom.policies.placement.placement_policy import Costs
from greenroom.scheduler.effects import CancelRun, Effect, ListRuns, Release, Run
from greenroom.scheduler.pool import Listed, Pool
from greenroom.scheduler.pool_workers import Capacity, WorkerState
from greenroom.scheduler.request_entries import RunResult
from greenroom.scheduler.trace_contexts import TraceContexts
from greenroom.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger(__name__)
_FULL_BACK_OFF_MS = 20.0
_DRAINING_BACK_OFF_MS = 500.0
_SMALL_CALL_S = 5.0
_RECONNECT_S = (0.05, 1.0)
_Refused = worker_pb2.RunRefused
_Closed = worker_pb2.RunClosed


class WorkerCalls:
    """Keeps a lease stream to every worker of the pool, and makes the calls that the pool wants.

    ``trace_contexts``: of the pool's requests. ``act`` carries out the effects of what workers answer. All of it runs
    as tasks that ``close`` ends.
    """

    def __init__(
        self,
        pool: Pool,
        trace_contexts: TraceContexts,
        dialer: Dialer,
        clock: Callable[[], float],
        act: Callable[[list[Effect]], None],
    ) -> None:
        self._pool = pool
        self._trace_contexts = trace_contexts
        self._dialer = dialer
        self._clock = clock
        self._act = act
        self._journal = ""
        self._lease_streams: dict[str, _LeaseStream] = {}
        self._calls: set[asyncio.Future[None]] = set()

    def read_from(self, journal: str) -> None:
        """Take the id of the journal that the pool's epochs are of. To be called before the first worker is met."""
        self._journal = journal

    def meet(self, member: Member) -> None:
        """A worker is there: connect to it, and again whenever the connection breaks, until it leaves."""
        if member.instance in self._lease_streams:
            return
        stub: worker_pb2_grpc.WorkerStub = self._dialer.stub(worker_pb2_grpc.WorkerStub, member.address)
        self._lease_streams[member.instance] = _LeaseStream(
            member, stub, self._pool, self._journal, self._clock, self._act
        )

    def leave(self, worker: str) -> None:
        """The worker has certainly gone."""
        stream = self._lease_streams.pop(worker, None)
        if stream is not None:
            stream.close()
            if not any(other.member.address == stream.member.address for other in self._lease_streams.values()):
                self._spawn(self._dialer.forget(stream.member.address))
        self._act(self._pool.worker_gone(worker, self._clock()))

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._lease_streams)

    def disconnect(self, worker: str) -> None:
        """Grant no lease on the present connection and make a new one."""
        stream = self._lease_streams.get(worker)
        if stream is not None:
            stream.reconnect()

    async def close(self) -> None:
        """Ends every stream and call. Runs go on at their workers for the grace period."""
        tasks = [*self._calls, *(stream.task for stream in self._lease_streams.values())]
        self._lease_streams.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def carry_out(self, effect: Run | ListRuns | CancelRun | Release) -> None:
        stream = self._lease_streams.get(effect.worker)
        match effect:
            case Run():
                self._spawn(self._run(stream, effect), effect.task.request.request_id)
            case ListRuns() if stream is not None:
                self._spawn(self._list(stream, effect.worker))
            case CancelRun() | Release() if stream is not None:
                self._spawn(self._cancel(stream, effect.request_id, effect.attempt), effect.request_id)
            case _:
                pass

    def _spawn(self, work: Coroutine[Any, Any, None], request_id: str = "") -> None:
        context = fresh_context(request_id)  # often it is the end of another request that starts a run
        task = asyncio.create_task(work, context=context)
        self._calls.add(task)
        task.add_done_callback(self._done, context=context)

    def _done(self, task: asyncio.Future[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a call to a worker failed by a defect", exc_info=error)

    async def _run(self, stream: _LeaseStream | None, effect: Run) -> None:
        worker, request_id, attempt = effect.worker, effect.task.request.request_id, effect.attempt
        now = self._clock
        if stream is None:
            self._act(self._pool.broken(worker, request_id, attempt, now()))
            return
        request = worker_pb2.RunRequest(
            epoch=self._pool.epoch,
            worker=worker,
            attempt=to_attempt(attempt),
            task=encode(effect.task),
            scheduler=self._pool.scheduler,
            journal=self._journal,
        )
        left_s = max(1.0, (effect.task.request.deadline_ms - now()) / 1000 + 5.0)
        response: worker_pb2.RunResponse | None = None
        with self._trace_contexts.span("place", request_id, "client", worker=worker, attempt=str(attempt)) as span:
            try:
                response = await stream.stub.Run(request, timeout=left_s, metadata=outgoing())
                span.set("end", response.WhichOneof("end") or "none")
            except grpc.aio.AioRpcError as error:
                _LOG.info("request %s: its call to %s broke: %s", request_id, worker, error.code().name)
                span.fail(error.code().name)
        if response is None:
            self._act(self._pool.broken(worker, request_id, attempt, now()))
        else:
            self._act(self._ended(effect.task, worker, attempt, response))

    def _ended(self, task: Task, worker: str, attempt: Attempt, response: worker_pb2.RunResponse) -> list[Effect]:
        request_id, now, pool = task.request.request_id, self._clock(), self._pool
        match response.WhichOneof("end"):
            case "result":
                return pool.result(worker, request_id, attempt, _result(response.result), now)
            case "refused":
                return self._refused(request_id, worker, attempt, response.refused, now)
            case "closed" if response.closed.why == _Closed.WHY_GIVEN_BACK:
                return pool.given_back(worker, request_id, attempt, now)
            case "closed":
                unwanted = response.closed.why == _Closed.WHY_UNWANTED
                return pool.broken(worker, request_id, attempt, now, unwanted=unwanted)
            case _:
                return pool.broken(worker, request_id, attempt, now)

    def _refused(
        self, request_id: str, worker: str, attempt: Attempt, refused: worker_pb2.RunRefused, now: float
    ) -> list[Effect]:
        match refused.why:
            case _Refused.WHY_INVALID:
                return self._pool.impossible(worker, request_id, attempt, refused.message, now)
            case _Refused.WHY_DRAINING:
                back_off_ms = _DRAINING_BACK_OFF_MS
            case _Refused.WHY_STALE:
                # Of the epoch: another scheduler holds the pool, and the journal will say so. Of the attempt: a defect.
                return self._pool.broken(worker, request_id, attempt, now)
            case _:
                back_off_ms = _FULL_BACK_OFF_MS
        full = refused.why == _Refused.WHY_FULL
        return self._pool.refused(worker, request_id, attempt, now, back_off_ms=back_off_ms, full=full)

    async def _list(self, stream: _LeaseStream, worker: str) -> None:
        request = worker_pb2.ListRunsRequest(
            epoch=self._pool.epoch, worker=worker, scheduler=self._pool.scheduler, journal=self._journal
        )
        try:
            response = await stream.stub.ListRuns(request, timeout=_SMALL_CALL_S)
        except grpc.aio.AioRpcError as error:
            _LOG.info("%s does not say what it runs: %s", worker, error.code().name)
            stream.reconnect()  # then it is asked again
            return
        runs = [Listed(run.request_id, from_attempt(run.attempt), run.finished) for run in response.runs]
        self._act(self._pool.listed(worker, runs, self._clock()))

    async def _cancel(self, stream: _LeaseStream, request_id: str, attempt: Attempt) -> None:
        request = worker_pb2.CancelRunRequest(
            epoch=self._pool.epoch,
            request_id=request_id,
            attempt=to_attempt(attempt),
            scheduler=self._pool.scheduler,
            journal=self._journal,
        )
        try:
            await stream.stub.CancelRun(request, timeout=_SMALL_CALL_S, metadata=outgoing())
        except grpc.aio.AioRpcError as error:
            _LOG.debug("%s was not told to end %s: %s", stream.member.instance, request_id, error.code().name)


class _LeaseStream:
    """One worker's lease stream. It is made again whenever it breaks."""

    def __init__(
        self,
        member: Member,
        stub: worker_pb2_grpc.WorkerStub,
        pool: Pool,
        journal: str,
        clock: Callable[[], float],
        act: Callable[[list[Effect]], None],
    ) -> None:
        self.member = member
        self.stub = stub
        self._pool = pool
        self._journal = journal
        self._clock = clock
        self._act = act
        self._connection: asyncio.Task[None] | None = None
        self._logged: set[tuple[grpc.StatusCode, str | None]] = set()
        """The kinds of failure that were logged since there was a lease."""
        self.task = asyncio.create_task(self._keep(), name=f"lease of {member.instance}")

    def close(self) -> None:
        self.task.cancel()

    def reconnect(self) -> None:
        if self._connection is not None:
            self._connection.cancel()

    async def _keep(self) -> None:
        pause = _RECONNECT_S[0]
        while True:
            began = self._clock()
            self._connection = asyncio.create_task(self._connect(), name=f"lease stream of {self.member.instance}")
            try:
                await asyncio.wait([self._connection])
            finally:
                self._connection.cancel()
            if not self._connection.cancelled() and (error := self._connection.exception()) is not None:
                if not isinstance(error, grpc.aio.AioRpcError):
                    _LOG.error("the lease of %s failed by a defect", self.member.instance, exc_info=error)
                elif error.code() is grpc.StatusCode.NOT_FOUND:
                    _LOG.info("%s is another now: %s", self.member.address, error.details())
                    self._act(self._pool.worker_gone(self.member.instance, self._clock()))
                    return
                else:
                    self._log_failure(error)
            pause = _RECONNECT_S[0] if self._clock() - began > 1000 else min(pause * 2, _RECONNECT_S[1])
            await asyncio.sleep(pause)

    def _log_failure(self, error: grpc.aio.AioRpcError) -> None:
        """Once for each code, until there is a lease again: texts name epochs and ports, which change. A worker that
        refuses needs attention, so it is a warning."""
        kind = error.code(), word_of(error)
        if kind not in self._logged:
            self._logged.add(kind)
            level = logging.INFO if error.code() is grpc.StatusCode.UNAVAILABLE else logging.WARNING
            reason = f"{error.code().name} {error.details()}"
            _LOG.log(level, "no lease with %s, trying again: %s", self.member.instance, reason)

    async def _connect(self) -> None:
        lease_ms = self._pool.config.lease_ms
        hello = worker_pb2.LeaseHello(
            epoch=self._pool.epoch,
            scheduler=self._pool.scheduler,
            worker=self.member.instance,
            lease_ms=0 if math.isinf(lease_ms) else max(1, int(lease_ms)),
            journal=self._journal,
        )
        call = self.stub.Lease()
        reached = False
        try:
            await _write(call, worker_pb2.LeaseFromScheduler(hello=hello))
            async for asked in call:
                if not self._renew(asked.state, first=not reached):
                    return
                reached = True
                self._logged.clear()
                grant = worker_pb2.LeaseGrant(sequence=asked.sequence, epoch=self._pool.epoch)
                await _write(call, worker_pb2.LeaseFromScheduler(grant=grant))
        finally:
            call.cancel()

    def _renew(self, state: worker_pb2.WorkerState, *, first: bool) -> bool:
        """Whether the lease is granted. The pool counts it from now, the worker from the time that it asked."""
        now, worker = self._clock(), self.member.instance
        if self._pool.epoch < 0:
            return False
        if first:
            capacity = Capacity(max_running=state.max_running, max_queued=state.max_queued, kv_tokens=state.kv_tokens)
            self._act(self._pool.worker_reached(worker, capacity, now))
        elif worker not in self._pool.workers:
            return False
        heard = WorkerState(
            draining=state.draining,
            costs=_costs(state),
            generated={run.request_id: run.generated for run in state.runs},
            missing=max(0.0, 1.0 - state.resident_experts / state.experts) if state.experts else 0.0,
            experts=state.experts,
            executing=frozenset(state.executing) if state.arranges else None,
            model="" if self.member.model is None else self.member.model.name,
        )
        self._act(self._pool.beat(worker, heard, now))
        return worker in self._pool.workers


def _result(result: worker_pb2.RunResult) -> RunResult:
    try:
        outputs = outputs_of(result)
    except msgspec.MsgspecError as error:
        return RunResult(FinishReason.FAILED, message=f"what its worker found can not be read: {error}")
    return RunResult(
        from_end_reason(result.reason),
        result.prompt_tokens,
        tuple(result.token_ids),
        logprobs_of(result),
        result.message,
        from_share(result.approximated),
        outputs,
        result.invalid,
        prompt_logprobs_of(result),
    )


def _costs(state: worker_pb2.WorkerState) -> Costs:
    """Values that are no times are passed over, and task types after the first thousand."""
    named = itertools.islice(sorted(state.load_ms_by_task.items()), MOST_TASKS)
    return Costs(
        token_ms=state.token_ms if 0 <= state.token_ms < math.inf else 0.0,
        load_ms_by_task={task: ms for task, ms in named if 0 <= ms < math.inf},
    )


async def _write(
    call: grpc.aio.StreamStreamCall[worker_pb2.LeaseFromScheduler, worker_pb2.LeaseFromWorker],
    message: worker_pb2.LeaseFromScheduler,
) -> None:
    """A write to a call that is over is passed over: the next read tells how it ended."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(message)
