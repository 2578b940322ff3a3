"""One pool's scheduler as a state machine: inputs in, effects out, no I/O.

docs/architecture/protocol.md has the rules by number; the comments here name them. Everything that happens comes in
as a call with the time, and what is to be done goes out as a list of effects. What an effect leads to (an append that
is read back, a worker's answer) is a further input, and may never come: whatever matters is asked for again.

The rules are in the files beside this one: ``claims`` (who holds the pool), ``dispatch`` (which request goes where),
``lost_workers`` (what runs again), ``expiry`` (what time brings) and ``outcomes`` (how a request ends).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.journal import Verdict
from greenroom.core.messages import (
    Cancel,
    Claim,
    Inference,
    JournalRecord,
    Lost,
    Outcome,
    QueueDepth,
    Rejected,
    Task,
    TaskRecord,
)
from greenroom.policies.placement.placement_policy import PendingRequest, PlacementPolicy
from greenroom.scheduler import lost_workers
from greenroom.scheduler.accuracy import Accuracy
from greenroom.scheduler.claims import begin_if_listed, claim, claim_again, claim_read
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.dispatch import dispatch
from greenroom.scheduler.effects import CancelRun, Effect, ListRuns, Release
from greenroom.scheduler.estimates import Estimates
from greenroom.scheduler.expiry import expire
from greenroom.scheduler.outcomes import COMPLETED, end, outcome_append_ended
from greenroom.scheduler.pool_state import PoolState, Role
from greenroom.scheduler.pool_workers import Capacity, PoolWorker, WorkerState
from greenroom.scheduler.request_entries import Entry, RequestStage, RunResult


@dataclass(frozen=True, slots=True)
class Listed:
    """A run that a worker has. ``finished``: only its result is left."""

    request_id: str
    attempt: Attempt
    finished: bool = False


class Pool(PoolState):
    """The scheduler's side of the protocol.

    ``estimates`` says how many tokens a request will probably generate and what a worker's time costs; it learns from
    the outcomes in the journal.

    Invariants, checked by ``audit``: a request waits, or is placed on one worker, or is being written down, never two
    of these; the tracker holds exactly the offsets of the requests that have not ended; nothing is started under an
    epoch that is not held.
    """

    def __init__(
        self,
        scheduler: str,
        config: PoolConfig,
        policy: PlacementPolicy,
        *,
        estimates: Estimates | None = None,
    ) -> None:
        super().__init__(scheduler, config)
        self.policy = policy
        self.accuracy = Accuracy()
        """What both estimators said of requests' latencies, and what these were."""
        self._estimates = estimates or Estimates()
        self._estimated = 0
        """``Estimates.changes`` when all that wait were estimated last."""

    # -- taking over ---------------------------------------------------------------------------------------------

    def take_over(self, journal_start: int, tasks_position: int) -> None:
        """Begin anew: the partition is ours. Then the journal from ``journal_start`` to its end through ``journal``,
        then ``claim``, then what comes. Tasks are read from ``tasks_position`` (rule 4)."""
        self.stand_by(journal_start, tasks_position)

    def claim(self, now: float) -> list[Effect]:
        """All of the journal has been read (rule 2)."""
        self.role = Role.CLAIMING
        return claim(self, now)

    def release(self) -> None:
        """The partition is no longer ours; the scheduler that has it will claim."""
        self.stand_by()

    @property
    def wants_tasks(self) -> bool:
        """Whether more tasks may be read now."""
        return (
            self.holds
            and self.tracker.open < self.config.read_ahead
            and self.tracker.span < self.config.read_ahead_span
            and self.input_bytes < self.config.read_ahead_bytes
        )

    @property
    def depth(self) -> QueueDepth:
        waiting = list(itertools.islice(self.waiting.values(), 1))
        oldest = 0.0 if not waiting or waiting[0].task is None else waiting[0].task.request.accepted_ms
        return QueueDepth(
            waiting=len(self.waiting),
            limit=self.config.max_waiting,
            running=sum(len(worker.placed) for worker in self.workers.values()),
            wait_ms=max(0.0, self.now - oldest) if oldest else 0.0,
        )

    # -- the journal ---------------------------------------------------------------------------------------------

    def journal(self, offset: int, record: JournalRecord, now: float) -> list[Effect]:
        """A record of the journal, in order. Only what is read here has happened."""
        self.now = now
        verdict = self.fold.read(offset, record)
        match record:
            case Claim():
                return claim_read(self, offset, record, verdict, now)
            case Lost() if verdict is Verdict.COUNTS:
                return lost_workers.loss_read(self, record) + self.schedule(now)
            case Outcome() if verdict is Verdict.COUNTS:
                return self._outcome_read(record, now)
        return []

    def append_ended(self, record: JournalRecord, now: float, *, refused: bool = False) -> list[Effect]:
        """An append has ended, acknowledged or not. ``refused``: the journal will never take this record.

        Of a record one append is under way at a time, however long it takes, and the next try counts from its end.
        Otherwise each try in an outage would land when that is over.
        """
        self.now = now
        match record:
            case Claim() if record is self.claim_sent:
                self.claim_sent, self.claimed_at = None, now
            case Outcome():
                entry = self.entries.get(record.request_id)
                if entry is not None and entry.appending is record:
                    return outcome_append_ended(self, entry, record, now, refused=refused)
            case Lost():
                return lost_workers.lost_append_ended(self, record, now)
        return []

    def dead_letter_written(self, request_id: str, now: float) -> list[Effect]:
        """The request's dead letter was acknowledged."""
        return lost_workers.dead_letter_written(self, request_id, now)

    def _outcome_read(self, outcome: Outcome, now: float) -> list[Effect]:
        request_id = outcome.request_id
        if request_id in self.finished:
            return []
        self.finished[request_id] = now + self.config.remember_ms
        self.early_losses.pop(request_id, None)
        self.early_unsure.pop(request_id, None)
        if outcome.reason in COMPLETED and outcome.token_ids:  # one that asked for no tokens says nothing of others
            cut = outcome.reason is FinishReason.LENGTH
            self._estimates.finished(outcome.task_type, len(outcome.token_ids), cut=cut)
        effects = self._release_unclaimed(request_id)
        entry = self.entries.get(request_id)
        if entry is None:
            return effects
        self.count(f"outcome_{outcome.reason.value}")
        if entry.worker is not None and entry.attempt is not None:
            effects.append(Release(entry.worker, request_id, entry.attempt))
        self.unplace(entry)
        for offset in entry.offsets:
            self.tracker.finish(offset)
        del self.entries[request_id]
        self.due.forget(request_id)
        self.input_bytes -= 0 if entry.task is None else entry.task.input_bytes
        return effects + self.schedule(now)

    def journal_unreadable(self, offset: int) -> None:
        """A record of the journal that can not be read: it is passed over."""
        self.count("journal_unreadable")
        self.fold.skip(offset)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def task(self, offset: int, record: TaskRecord, now: float) -> list[Effect]:
        """A record of ``tasks``, in order."""
        self.now = now
        self.tracker.start(offset)
        request_id = record.request.request_id if isinstance(record, Task) else record.request_id
        if request_id in self.finished:
            self.tracker.finish(offset)
            return []
        entry = self.entries.get(request_id)
        if entry is None:
            entry = self.entries[request_id] = Entry(request_id, next(self.orders))
            entry.losses = self.early_losses.pop(request_id, set())
            entry.unsure = self.early_unsure.pop(request_id, set())
        entry.offsets.append(offset)
        match record:
            case Task():
                return self._task(entry, record, now)
            case Cancel():
                # A cancel of an unknown request is an outcome at once. So it is remembered, across restarts too,
                # and whatever arrives under that id later has ended already (rule 9).
                return end(self, entry, FinishReason.CANCELLED, now, message=record.reason or "cancelled")
            case Rejected():
                if entry.task is not None:
                    return []  # a broken copy of a task that is known
                return end(self, entry, FinishReason.FAILED, now, message=record.reason)

    def _task(self, entry: Entry, task: Task, now: float) -> list[Effect]:
        if entry.task is not None or entry.stage is RequestStage.ENDING:
            return []  # a second copy, of this gateway or another: it ends with the first (rule 10)
        entry.task = task
        self.input_bytes += task.input_bytes
        entry.pending = self._pending(task)
        if now >= task.request.deadline_ms:
            return end(self, entry, FinishReason.EXPIRED, now, message="its deadline had passed when it was read")
        if lost_workers.hopeless(self, entry):
            return lost_workers.give_up(self, entry)
        running = self._worker_that_runs(entry.request_id)
        if running is not None:
            return self.place(entry, running, now) + self._release_unclaimed(entry.request_id)
        # What was accepted under another scheduler was within its bound.
        if len(self.waiting) >= self.config.max_waiting and task.request.accepted_ms >= self.held_since:
            message = f"{len(self.waiting)} requests wait already, as many as may"
            return end(self, entry, FinishReason.SHED, now, message=message)
        self.wait(entry)
        return self.schedule(now)

    def unreadable(self, offset: int, request_id: str | None, reason: str, now: float) -> list[Effect]:
        """A record of ``tasks`` that can not be read; its dead letter was written (rule 11). Where at least its
        ``request_id`` could be read, the request gets an outcome: a failure."""
        self.count("task_unreadable")
        if request_id is not None:
            return self.task(offset, Rejected(request_id=request_id, pool=0, reason=reason), now)
        self.tracker.start(offset)
        self.tracker.finish(offset)
        return []

    def _pending(self, task: Task) -> PendingRequest:
        request = task.request
        if isinstance(request, Inference):
            return PendingRequest(
                request_id=request.request_id,
                arrived_ms=request.accepted_ms,
                input_tokens=0,
                kv_need=0,
                expected_tokens=1,
                deadline_ms=request.deadline_ms,
                task=task.task_type,
                slo_ttft_ms=request.slo.ttft_ms,
                slo_e2e_ms=request.slo.e2e_ms,
                priority=request.priority,
                tenant=request.tenant,
            )
        sampling, prompt = request.sampling, len(request.prompt_ids)
        limit = 1 if sampling.max_tokens is None else sampling.max_tokens
        answer = self._estimates.held_tokens(task.task_type, prompt, limit) if limit else 0
        return PendingRequest(
            request_id=request.request_id,
            arrived_ms=request.accepted_ms,
            input_tokens=prompt,
            kv_need=prompt + answer - 1,
            expected_tokens=self._estimates.tokens(task.task_type, max(1, limit)),
            deadline_ms=request.deadline_ms,
            task=task.task_type,
            slo_ttft_ms=request.slo.ttft_ms,
            slo_e2e_ms=request.slo.e2e_ms,
            priority=request.priority,
            tenant=request.tenant,
            most_tokens=limit,
        )

    # -- workers -------------------------------------------------------------------------------------------------

    def expect_worker(self, name: str) -> None:
        """It is a member; what it runs is asked before anything is started (rule 3)."""
        if name not in self.workers:
            self.expected_workers.add(name)

    def worker_reached(self, name: str, capacity: Capacity, now: float) -> list[Effect]:
        """It was granted a lease on a new connection."""
        self.now = now
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = PoolWorker(name, capacity, now + self.config.lease_ms)
        worker.capacity, worker.listed = capacity, False
        worker.lease_until = now + self.config.lease_ms
        return [ListRuns(name)] if self.holds else []

    def beat(self, name: str, state: WorkerState, now: float) -> list[Effect]:
        """Its lease was renewed: it ends ``lease_ms`` from now at the latest (rule 12)."""
        self.now = now
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.lease_until = now + self.config.lease_ms
        changed = worker.state.draining != state.draining
        worker.state, worker.heard_ms = state, now
        self._estimates.meet(state.model, state.experts)
        worker.costs = self._estimates.costs(state.costs, missing=state.missing, rows=worker.capacity.max_running)
        return self.schedule(now) if changed else []

    def listed(self, name: str, runs: Iterable[Listed], now: float) -> list[Effect]:
        """What the worker runs, asked for by ``ListRuns``."""
        self.now = now
        worker = self.workers.get(name)
        if worker is None or not self.holds:
            return []
        effects: list[Effect] = []
        worker.listed = True
        worker.unclaimed = {}
        self.expected_workers.discard(name)
        present = {run.request_id: run for run in runs}
        for request_id, run in present.items():
            entry = self.entries.get(request_id)
            if request_id in self.finished:
                effects.append(Release(name, request_id, run.attempt))
            elif entry is None:
                worker.unclaimed[request_id] = run.attempt  # its task has not been read yet
            elif entry.stage is RequestStage.WAITING and entry.task is not None:
                effects += self.place(entry, worker, now)
            elif not _keeps_its_run(entry, name):
                effects.append(CancelRun(name, request_id, run.attempt))
        for entry in list(worker.placed.values()):
            if entry.stage is RequestStage.PLACED and entry.request_id not in present:
                # The call never came there, or the run is forgotten: neither is a loss.
                effects += self.run(entry, worker)
        begin_if_listed(self, now)
        return effects + self.schedule(now)

    def worker_gone(self, name: str, now: float) -> list[Effect]:
        """It left, or another instance answers at its address."""
        self.now = now
        self.expected_workers.discard(name)
        return lost_workers.lose(self, name, now) + self.schedule(now)

    def _worker_that_runs(self, request_id: str) -> PoolWorker | None:
        for worker in self.workers.values():
            if worker.unclaimed.pop(request_id, None) is not None:
                return worker
        return None

    def _release_unclaimed(self, request_id: str) -> list[Effect]:
        """What workers run of a request that has ended, or goes on elsewhere."""
        found = [(worker.name, worker.unclaimed.pop(request_id, None)) for worker in self.workers.values()]
        return [Release(name, request_id, attempt) for name, attempt in found if attempt is not None]

    # -- gateways ------------------------------------------------------------------------------------------------

    @property
    def gateways(self) -> frozenset[str]:
        """Those that requests without a key came through. Such requests end with their gateway (rule 7)."""
        if not self.holds:
            return frozenset()
        return frozenset(gateway for entry in self.entries.values() if (gateway := _needs_its_gateway(entry)))

    def gateway_gone(self, gateway: str, now: float) -> list[Effect]:
        """It said goodbye, or was silent for so long that no client waits there any more (rule 7)."""
        self.now = now
        effects: list[Effect] = []
        for entry in list(self.entries.values()):
            if _needs_its_gateway(entry) == gateway:
                self.count("gateway_gone")
                effects += end(self, entry, FinishReason.CANCELLED, now, message="its gateway has gone")
        return effects + self.schedule(now)

    # -- runs ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Effect]:
        """Place the requests that wait, where there is room, by what is known of answers now."""
        self.now = now
        if self._estimated != self._estimates.changes:
            self._estimated = self._estimates.changes
            for entry in self.waiting.values():
                entry.pending = None if entry.task is None else self._pending(entry.task)
        return dispatch(self, self.policy, now)

    def _placed(self, worker: str, request_id: str, attempt: Attempt) -> Entry | None:
        """The request if that is its attempt; what is said of any other is of the past (rule 1)."""
        entry = self.entries.get(request_id)
        if entry is None or entry.stage is not RequestStage.PLACED:
            return None
        return entry if entry.worker == worker and entry.attempt == attempt else None

    def result(self, worker: str, request_id: str, attempt: Attempt, result: RunResult, now: float) -> list[Effect]:
        """The run came to its end."""
        self.now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        if entry.task is not None and result.reason in COMPLETED and not entry.begun:
            self.accuracy.add(entry.estimates_ms, now - entry.task.request.accepted_ms)
        return end(self, entry, result.reason, now, message=result.message, result=result)

    def refused(
        self, worker: str, request_id: str, attempt: Attempt, now: float, *, back_off_ms: float, full: bool = False
    ) -> list[Effect]:
        """The worker did not take it: no attempt. Nothing more is placed there for ``back_off_ms``. ``full``: it had no
        room."""
        self.now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        self.workers[worker].blocked_until = now + back_off_ms
        if not entry.begun:
            entry.placed_ms = 0.0
        self.wait(entry)
        if full:
            self.workers[worker].full = len(self.workers[worker].placed), now
        return self.schedule(now)

    def impossible(self, worker: str, request_id: str, attempt: Attempt, why: str, now: float) -> list[Effect]:
        """The worker says that it can never run. No other worker of the pool can: all serve the same model."""
        self.now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        result = RunResult(FinishReason.FAILED, message=why, invalid=True)
        return end(self, entry, FinishReason.FAILED, now, message=why, result=result)

    def given_back(self, worker: str, request_id: str, attempt: Attempt, now: float) -> list[Effect]:
        """The worker stops and hands over what it has not finished: no loss."""
        entry = self._placed(worker, request_id, attempt)
        if entry is not None:
            entry.begun = True
        return self.refused(worker, request_id, attempt, now, back_off_ms=self.config.retry_ms)

    def broken(
        self, worker: str, request_id: str, attempt: Attempt, now: float, *, unwanted: bool = False
    ) -> list[Effect]:
        """The call ended without a result. While the worker lives its run may too: it is called again.

        ``unwanted``: the gateway has no use for it. Then a cancel or an outcome is on its way here. If it is not after
        all, the run begins again.
        """
        self.now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is not None:
            entry.again_at = now + self.config.retry_ms * (1.0 if unwanted else 0.1)
            self.watch(entry)
        return []

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Whatever is due; to be called several times in a ``retry_ms``."""
        self.now = now
        if self.role is Role.STANDBY:
            return []
        effects = claim_again(self, now)
        if self.role is Role.CLAIMING:
            return effects
        effects += expire(self, now)
        begin_if_listed(self, now)
        for request_id in list(itertools.takewhile(lambda known: self.finished[known] <= now, self.finished)):
            del self.finished[request_id]
        return effects + self.schedule(now)


def _keeps_its_run(entry: Entry, worker: str) -> bool:
    """Whether the run of it on ``worker`` is of use. The run of a request that ends is of use where it is the source
    of the outcome's text, for another scheduler may have to write the outcome."""
    if entry.worker != worker or entry.stage not in (RequestStage.PLACED, RequestStage.ENDING):
        return False
    return entry.stage is RequestStage.PLACED or (entry.outcome is not None and entry.outcome.attempt is not None)


def _needs_its_gateway(entry: Entry) -> str | None:
    """The gateway whose client alone the request is for; None where a key may bring a client back."""
    if entry.task is None or entry.task.request.keyed:
        return None
    return entry.task.request.reply_to if entry.stage in (RequestStage.WAITING, RequestStage.PLACED) else None
