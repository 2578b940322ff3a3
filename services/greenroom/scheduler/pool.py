"""One pool's scheduler as a state machine: inputs in, effects out, no I/O.

docs/architecture/protocol.md has the rules by number; the comments here name them. Everything that happens comes in
as a call with the time, and what is to be done goes out as a list of effects. What an effect leads to (an append that
is read back, a worker's answer) is a further input, and may never come: whatever matters is asked for again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import (
    Cancel,
    Claim,
    JournalRecord,
    Lost,
    Outcome,
    QueueDepth,
    Rejected,
    Task,
    TaskRecord,
)
from greenroom.fabric.commits import PrefixTracker
from greenroom.policies.placement.latency_estimate import ESTIMATORS, latency_ms
from greenroom.policies.placement.placement_policy import (
    PendingRequest,
    Placement,
    PlacementPolicy,
    PlacementState,
    WorkerView,
)
from greenroom.scheduler.accuracy import Accuracy
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.effects import (
    Append,
    Bury,
    CancelRun,
    Deposed,
    Disconnect,
    Effect,
    ListRuns,
    Release,
    Run,
)
from greenroom.scheduler.entries import Entry, RunResult, Stage
from greenroom.scheduler.estimates import Foresight
from greenroom.scheduler.pool_workers import Capacity, Seat, WorkerState


class Role(Enum):
    """What this scheduler is to its pool."""

    STANDBY = "standby"
    """It holds nothing; it may be reading the journal before a take-over."""
    CLAIMING = "claiming"
    """Its claim is on the way."""
    LISTING = "listing"
    """Its claim stands; it learns what runs before it starts anything."""
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Listed:
    """A run that a worker has. ``finished``: only its result is left."""

    request_id: str
    attempt: Attempt
    finished: bool = False


class Pool:
    """The scheduler's side of the protocol.

    Times are Unix milliseconds on a clock that never jumps. ``foresight`` says how many tokens a request will probably
    generate and what a worker's time costs; it learns from the outcomes in the journal.

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
        foresight: Foresight | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.policy = policy
        self.counts: dict[str, int] = {}
        """How often what happened, for metrics."""
        self.accuracy = Accuracy()
        """What both estimators said of requests' latencies, and what these were."""
        self._foresight = foresight or Foresight()
        self._stand_by()

    def _stand_by(self) -> None:
        self.role = Role.STANDBY
        self.epoch = -1
        self.fold = JournalFold()
        self.tracker = PrefixTracker(0)
        self.entries: dict[str, Entry] = {}
        self.seats: dict[str, Seat] = {}
        self._waiting: dict[str, Entry] = {}
        self._finished: dict[str, float] = {}
        self._losses: dict[str, set[Attempt]] = {}
        self._expected_workers: set[str] = set()
        self._listing_until = 0.0
        self._claimed_at = self._held_since = self._now = 0.0
        self._claim_sent: Claim | None = None
        """The claim whose append has not come to its end."""
        self._attempts = itertools.count()
        self._orders = itertools.count()

    # -- taking over ---------------------------------------------------------------------------------------------

    def take_over(self, journal_start: int, tasks_position: int) -> None:
        """Begin anew: the partition is ours. Then the journal from ``journal_start`` to its end through ``journal``,
        then ``claim``, then what comes. Tasks are read from ``tasks_position`` (rule 4)."""
        self._stand_by()
        self.fold = JournalFold(journal_start)
        self.tracker = PrefixTracker(tasks_position)

    def claim(self, now: float) -> list[Effect]:
        """All of the journal has been read (rule 2)."""
        self.role = Role.CLAIMING
        return self._claim(now)

    def _claim(self, now: float) -> list[Effect]:
        self._claimed_at = now
        self._claim_sent = Claim(scheduler=self.scheduler, read_to=self.fold.next_offset)
        return [Append(self._claim_sent)]

    def release(self) -> None:
        """The partition is no longer ours; whoever has it will claim."""
        self._stand_by()

    @property
    def wants_tasks(self) -> bool:
        """Whether more tasks may be read now."""
        return (
            self.role in (Role.LISTING, Role.ACTIVE)
            and self.tracker.open < self.config.read_ahead
            and self.tracker.span < self.config.read_ahead_span
        )

    @property
    def depth(self) -> QueueDepth:
        waiting = list(itertools.islice(self._waiting.values(), 1))
        oldest = 0.0 if not waiting or waiting[0].task is None else waiting[0].task.request.accepted_ms
        return QueueDepth(
            waiting=len(self._waiting),
            limit=self.config.max_waiting,
            running=sum(len(seat.placed) for seat in self.seats.values()),
            wait_ms=max(0.0, self._now - oldest) if oldest else 0.0,
        )

    # -- the journal ---------------------------------------------------------------------------------------------

    def journal(self, offset: int, record: JournalRecord, now: float) -> list[Effect]:
        """A record of the journal, in order. Only what is read here has happened."""
        self._now = now
        verdict = self.fold.read(offset, record)
        match record:
            case Claim():
                return self._claim_read(offset, record, verdict, now)
            case Lost() if verdict is Verdict.COUNTS:
                return self._loss_read(record, now)
            case Outcome() if verdict is Verdict.COUNTS:
                return self._outcome_read(record, now)
        return []

    def _claim_read(self, offset: int, claim: Claim, verdict: Verdict, now: float) -> list[Effect]:
        mine = claim.scheduler == self.scheduler
        if self.role is Role.STANDBY:
            return []
        if mine:
            self._claim_sent = None
        if verdict is not Verdict.COUNTS:
            # Whatever came between has been read now, so the next one stands.
            return self._claim(now) if mine and self.role is Role.CLAIMING else []
        if not mine:
            if self.role is Role.CLAIMING:
                return []  # our own will be void, or was made with this one read; either way it is yet to come
            self._stand_by()
            self._count("deposed")
            return [Deposed(claim.scheduler)]
        self.epoch = offset
        self._attempts = itertools.count()
        if self.role is not Role.CLAIMING:
            return self._write_again(now)
        self.role = Role.LISTING
        self._held_since = now
        self._listing_until = now + self.config.lease_ms
        return [ListRuns(seat.worker) for seat in self.seats.values()]

    def _write_again(self, now: float) -> list[Effect]:
        """What was written under the former epoch will not count. What is still on its way there follows when that
        append has ended."""
        effects: list[Effect] = []
        losing: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if entry.appending is not None:
                continue
            if entry.stage is Stage.ENDING:
                effects += self._append_outcome(entry, now)
            elif entry.stage is Stage.LOSING and entry.worker is not None:
                losing.setdefault(entry.worker, []).append(entry)
        for worker, entries in losing.items():
            effects += self._append_lost(worker, entries, now)
        return effects

    def append_ended(self, record: JournalRecord, now: float, *, refused: bool = False) -> list[Effect]:
        """An append that was wanted has come to its end: acknowledged, or not for all that is known. ``refused``: the
        journal will never take this record.

        Of a record one append is on its way at a time, however long it takes, and the next try counts from its end:
        else each try in an outage would land when that is over.
        """
        self._now = now
        match record:
            case Claim() if record is self._claim_sent:
                self._claim_sent, self._claimed_at = None, now
            case Outcome():
                entry = self.entries.get(record.request_id)
                if entry is None or entry.appending is not record:
                    return []
                entry.appending, entry.asked_ms = None, now
                if refused and record.message != _TOO_LARGE:
                    self._count("outcome_refused")
                    entry.outcome = _without_tokens(record)
                    return self._append_outcome(entry, now)
                return self._append_outcome(entry, now) if record.epoch != self.epoch else []
            case Lost():
                entries = [self.entries.get(request_id) for request_id, _ in record.attempts]
                waiting = [entry for entry in entries if entry is not None and entry.appending is record]
                for entry in waiting:
                    entry.appending, entry.asked_ms = None, now
                losing = [entry for entry in waiting if entry.stage is Stage.LOSING]
                if losing and record.epoch != self.epoch:
                    return self._append_lost(record.worker, losing, now)
        return []

    def _loss_read(self, lost: Lost, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, attempt in lost.attempts:
            entry = self.entries.get(request_id)
            if entry is None:
                if request_id not in self._finished:  # before its task is read, after a restart
                    self._losses.setdefault(request_id, set()).add(attempt)
                continue
            entry.losses.add(attempt)
            if entry.stage is Stage.LOSING and entry.attempt == attempt:
                effects += self._after_loss(entry, now)
        return effects + self.schedule(now)

    def _after_loss(self, entry: Entry, now: float) -> list[Effect]:
        entry.begun, entry.appending = True, None
        if len(entry.losses) < self.config.max_losses:
            self._wait(entry)
            return []
        return self._give_up(entry, now)

    def _give_up(self, entry: Entry, now: float) -> list[Effect]:
        """Rule 5: it seems to end every worker that it meets. The dead letter comes first: once there is an outcome
        nobody looks at the request again."""
        assert entry.task is not None
        self._unplace(entry)
        entry.stage = Stage.BURYING
        return [Bury(entry.request_id, entry.task, _given_up(entry))]

    def buried(self, request_id: str, now: float) -> list[Effect]:
        """Its dead letter was acknowledged."""
        entry = self.entries.get(request_id)
        if entry is None or entry.stage is not Stage.BURYING:
            return []
        return self._end(entry, FinishReason.FAILED, now, message=_given_up(entry))

    def _outcome_read(self, outcome: Outcome, now: float) -> list[Effect]:
        request_id = outcome.request_id
        if request_id in self._finished:
            return []
        self._finished[request_id] = now + self.config.remember_ms
        self._losses.pop(request_id, None)
        if outcome.reason in _COMPLETED:
            self._foresight.finished(outcome.task_type, len(outcome.token_ids))
        effects = self._release_unclaimed(request_id)
        entry = self.entries.get(request_id)
        if entry is None:
            return effects
        self._count(f"outcome_{outcome.reason.value}")
        if entry.worker is not None and entry.attempt is not None:
            effects.append(Release(entry.worker, request_id, entry.attempt))
        self._unplace(entry)
        for offset in entry.offsets:
            self.tracker.finish(offset)
        del self.entries[request_id]
        return effects + self.schedule(now)

    def journal_unreadable(self, offset: int) -> None:
        """A record of the journal that nobody can read: it is as if it were not there."""
        self._count("journal_unreadable")
        self.fold.skip(offset)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def task(self, offset: int, record: TaskRecord, now: float) -> list[Effect]:
        """A record of ``tasks``, in order."""
        self._now = now
        self.tracker.start(offset)
        request_id = record.request.request_id if isinstance(record, Task) else record.request_id
        if request_id in self._finished:
            self.tracker.finish(offset)
            return []
        entry = self.entries.get(request_id)
        if entry is None:
            entry = self.entries[request_id] = Entry(request_id, next(self._orders))
            entry.losses = self._losses.pop(request_id, set())
        entry.offsets.append(offset)
        match record:
            case Task():
                return self._task(entry, record, now)
            case Cancel():
                # One whose request is unknown is an outcome at once: so it is remembered, across restarts too,
                # and whatever arrives under that id later has ended already (rule 9).
                return self._end(entry, FinishReason.CANCELLED, now, message=record.reason or "cancelled")
            case Rejected():
                if entry.task is not None:
                    return []  # a broken copy of one that is known
                return self._end(entry, FinishReason.FAILED, now, message=record.reason)

    def _task(self, entry: Entry, task: Task, now: float) -> list[Effect]:
        if entry.task is not None or entry.stage is Stage.ENDING:
            return []  # a second copy, of this gateway or another: it ends with the first (rule 10)
        entry.task = task
        entry.pending = self._pending(task)
        if now >= task.request.deadline_ms:
            return self._end(entry, FinishReason.EXPIRED, now, message="its deadline had passed when it was read")
        if len(entry.losses) >= self.config.max_losses:
            return self._give_up(entry, now)
        running = self._seat_that_runs(entry.request_id)
        if running is not None:
            return self._place(entry, running, now) + self._release_unclaimed(entry.request_id)
        # What was accepted under another scheduler was within its bound.
        if len(self._waiting) >= self.config.max_waiting and task.request.accepted_ms >= self._held_since:
            message = f"{len(self._waiting)} requests wait already, as many as may"
            return self._end(entry, FinishReason.SHED, now, message=message)
        self._wait(entry)
        return self.schedule(now)

    def unreadable(self, offset: int, request_id: str | None, reason: str, now: float) -> list[Effect]:
        """A record of ``tasks`` that nobody can read; its dead letter was written (rule 11). ``request_id``: where it
        could be read, its client is owed an outcome all the same."""
        self._count("task_unreadable")
        if request_id is not None:
            return self.task(offset, Rejected(request_id=request_id, pool=0, reason=reason), now)
        self.tracker.start(offset)
        self.tracker.finish(offset)
        return []

    def _pending(self, task: Task) -> PendingRequest:
        request = task.request
        limit = request.sampling.max_tokens or 1
        return PendingRequest(
            request_id=request.request_id,
            arrived_ms=request.accepted_ms,
            input_tokens=len(request.prompt_ids),
            kv_need=len(request.prompt_ids) + limit - 1,
            expected_tokens=self._foresight.tokens(task.task_type, limit),
            deadline_ms=request.deadline_ms,
            task=task.task_type,
            slo_ttft_ms=request.slo.ttft_ms,
            slo_e2e_ms=request.slo.e2e_ms,
            priority=request.priority,
            tenant=request.tenant,
        )

    # -- workers -------------------------------------------------------------------------------------------------

    def expect_worker(self, worker: str) -> None:
        """It is a member; what it runs is asked before anything is started (rule 3)."""
        if worker not in self.seats:
            self._expected_workers.add(worker)

    def worker_reached(self, worker: str, capacity: Capacity, now: float) -> list[Effect]:
        """It was granted a lease on a new connection."""
        self._now = now
        seat = self.seats.get(worker)
        if seat is None:
            seat = self.seats[worker] = Seat(worker, capacity, now + self.config.lease_ms)
        seat.capacity, seat.listed = capacity, False
        seat.lease_until = now + self.config.lease_ms
        return [ListRuns(worker)] if self.role in (Role.LISTING, Role.ACTIVE) else []

    def beat(self, worker: str, state: WorkerState, now: float) -> list[Effect]:
        """Its lease was renewed: it ends ``lease_ms`` from now at the latest (rule 12)."""
        self._now = now
        seat = self.seats.get(worker)
        if seat is None:
            return []
        seat.lease_until = now + self.config.lease_ms
        changed = seat.state.draining != state.draining
        seat.state, seat.heard_ms = state, now
        self._foresight.meet(state.model, state.experts)
        seat.costs = self._foresight.costs(state.costs, missing=state.missing, rows=seat.capacity.max_running)
        return self.schedule(now) if changed else []

    def listed(self, worker: str, runs: Iterable[Listed], now: float) -> list[Effect]:
        """What the worker runs, asked for by ``ListRuns``."""
        self._now = now
        seat = self.seats.get(worker)
        if seat is None or self.role not in (Role.LISTING, Role.ACTIVE):
            return []
        effects: list[Effect] = []
        seat.listed = True
        seat.unclaimed = {}
        self._expected_workers.discard(worker)
        present = {run.request_id: run for run in runs}
        for request_id, run in present.items():
            entry = self.entries.get(request_id)
            if request_id in self._finished:
                effects.append(Release(worker, request_id, run.attempt))
            elif entry is None:
                seat.unclaimed[request_id] = run.attempt  # its task has not been read yet
            elif entry.stage is Stage.WAITING and entry.task is not None:
                effects += self._place(entry, seat, now)
            elif not (entry.stage in (Stage.PLACED, Stage.ENDING) and entry.worker == worker and _needs_its_run(entry)):
                effects.append(CancelRun(worker, request_id, run.attempt))
        for entry in list(seat.placed.values()):
            if entry.stage is Stage.PLACED and entry.request_id not in present:
                # The call never came there, or the run is forgotten: neither is a loss.
                effects += self._run(entry, seat, now)
        self._begin_if_listed(now)
        return effects + self.schedule(now)

    def worker_gone(self, worker: str, now: float) -> list[Effect]:
        """It left, or another instance answers at its address."""
        self._now = now
        self._expected_workers.discard(worker)
        return self._lose(worker, now) + self.schedule(now)

    def _lose(self, worker: str, now: float) -> list[Effect]:
        seat = self.seats.pop(worker, None)
        if seat is None:
            return []
        effects: list[Effect] = [Disconnect(worker)]
        lost = []
        for entry in seat.placed.values():
            entry.again_at = None
            if entry.stage is Stage.PLACED:
                entry.stage = Stage.LOSING
                lost.append(entry)
        if lost:
            self._count("worker_lost")
            effects += self._append_lost(worker, lost, now)
        return effects

    def _append_lost(self, worker: str, entries: Collection[Entry], now: float) -> list[Effect]:
        attempts = [(entry.request_id, entry.attempt) for entry in entries if entry.attempt is not None]
        lost = Lost(epoch=self.epoch, worker=worker, attempts=tuple(attempts))
        for entry in entries:
            entry.asked_ms, entry.appending = now, lost
        return [Append(lost)]

    def _seat_that_runs(self, request_id: str) -> Seat | None:
        for seat in self.seats.values():
            if seat.unclaimed.pop(request_id, None) is not None:
                return seat
        return None

    def _release_unclaimed(self, request_id: str) -> list[Effect]:
        """What workers run of a request that has ended, or goes on elsewhere."""
        found = [(seat.worker, seat.unclaimed.pop(request_id, None)) for seat in self.seats.values()]
        return [Release(worker, request_id, attempt) for worker, attempt in found if attempt is not None]

    # -- gateways ------------------------------------------------------------------------------------------------

    @property
    def gateways(self) -> frozenset[str]:
        """Those that requests without a key came through, and which therefore end with them (rule 7)."""
        if self.role not in (Role.LISTING, Role.ACTIVE):
            return frozenset()
        return frozenset(gateway for entry in self.entries.values() if (gateway := _needs_its_gateway(entry)))

    def gateway_gone(self, gateway: str, now: float) -> list[Effect]:
        """It said goodbye, or was silent for so long that nobody waits there any more (rule 7)."""
        self._now = now
        effects: list[Effect] = []
        for entry in list(self.entries.values()):
            if _needs_its_gateway(entry) == gateway:
                self._count("gateway_gone")
                effects += self._end(entry, FinishReason.CANCELLED, now, message="its gateway has gone")
        return effects + self.schedule(now)

    # -- runs ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Effect]:
        """Place what waits, where there is room."""
        self._now = now
        if self.role is not Role.ACTIVE or not self._waiting:
            return []
        effects = self._place_suspects(now)
        waiting = tuple([  # a list, since it is the faster of the two and there may be a thousand
            entry.pending
            for entry in self._waiting.values()
            if entry.pending is not None and (not entry.losses or not self._suspect(entry))
        ])  # fmt: skip
        views = tuple(seat.view(now) for seat in self.seats.values() if seat.takes(now) and not seat.reserved)
        if not waiting:
            return effects
        decision = self.policy.decide(PlacementState(waiting, views), now)
        largest = max((seat.capacity.kv_tokens for seat in self.seats.values()), default=0)
        for shed in decision.shed:
            entry = self._waiting[shed.request_id]
            if shed.reason == "unservable" and entry.pending is not None and entry.pending.kv_need <= largest:
                continue  # only those that can take something now are too small
            reason = FinishReason.EXPIRED if shed.reason == "expired" else FinishReason.SHED
            effects += self._end(entry, reason, now, message=_SHED.get(shed.reason, shed.reason))
        estimates = _estimates_ms(waiting, views, decision.place, now)
        for placement in decision.place:
            entry = self._waiting[placement.request_id]
            effects += self._place(entry, self.seats[placement.worker], now)
            entry.estimates_ms = estimates[placement.request_id]
        return effects

    def _place_suspects(self, now: float) -> list[Effect]:
        """Rule 5: one that was there when workers were lost runs alone. One worker at a time is emptied for it."""
        for seat in self.seats.values():
            seat.reserved = False
        effects: list[Effect] = []
        suspects = [entry for entry in self._waiting.values() if entry.losses and self._suspect(entry)]
        for entry in suspects:
            usable = [seat for seat in self.seats.values() if seat.takes(now) and not seat.reserved]
            if not usable:
                break
            seat = min(usable, key=lambda seat: (len(seat.placed), seat.worker))
            if seat.placed:
                seat.reserved = True
                break
            seat.alone = entry.request_id
            effects += self._place(entry, seat, now)
        return effects

    def _suspect(self, entry: Entry) -> bool:
        return len(entry.losses) >= self.config.alone_after

    def _place(self, entry: Entry, seat: Seat, now: float) -> list[Effect]:
        self._waiting.pop(entry.request_id, None)
        entry.stage, entry.worker, entry.placed_ms = Stage.PLACED, seat.worker, now
        seat.placed[entry.request_id] = entry
        return self._run(entry, seat, now)

    def _run(self, entry: Entry, seat: Seat, now: float) -> list[Effect]:
        """Each call has an attempt of its own: where something runs it is attached to and relabelled (rule 3)."""
        assert entry.task is not None
        entry.attempt = Attempt(self.epoch, next(self._attempts))
        entry.again_at = None
        return [Run(seat.worker, entry.attempt, entry.task)]

    def _wait(self, entry: Entry) -> None:
        """Back to the place that its arrival gives it."""
        self._unplace(entry)
        entry.stage = Stage.WAITING
        last = next(reversed(self._waiting.values()), None)
        self._waiting[entry.request_id] = entry
        if last is not None and last.order > entry.order:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].order))

    def _unplace(self, entry: Entry) -> None:
        self._waiting.pop(entry.request_id, None)
        seat = self.seats.get(entry.worker) if entry.worker is not None else None
        if seat is not None:
            seat.placed.pop(entry.request_id, None)
            if seat.alone == entry.request_id:
                seat.alone = None
        entry.worker = entry.attempt = entry.again_at = None
        entry.estimates_ms = {}

    def _placed(self, worker: str, request_id: str, attempt: Attempt) -> Entry | None:
        """The request if that is its attempt; what is said of any other is of the past (rule 1)."""
        entry = self.entries.get(request_id)
        if entry is None or entry.stage is not Stage.PLACED:
            return None
        return entry if entry.worker == worker and entry.attempt == attempt else None

    def result(self, worker: str, request_id: str, attempt: Attempt, result: RunResult, now: float) -> list[Effect]:
        """The run came to its end."""
        self._now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        if entry.task is not None and result.reason in _COMPLETED and not entry.begun:
            self.accuracy.add(entry.estimates_ms, now - entry.task.request.accepted_ms)
        return self._end(entry, result.reason, now, message=result.message, result=result)

    def refused(
        self, worker: str, request_id: str, attempt: Attempt, now: float, *, back_off_ms: float
    ) -> list[Effect]:
        """The worker did not take it: no attempt. Nothing more is placed there for ``back_off_ms``."""
        self._now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        self.seats[worker].blocked_until = now + back_off_ms
        if not entry.begun:
            entry.placed_ms = 0.0
        self._wait(entry)
        return self.schedule(now)

    def impossible(self, worker: str, request_id: str, attempt: Attempt, why: str, now: float) -> list[Effect]:
        """The worker says that it can never run: no other of the pool can, since they serve the same model."""
        self._now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is None:
            return []
        result = RunResult(FinishReason.FAILED, message=why)
        return self._end(entry, FinishReason.FAILED, now, message=why, result=result)

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

        ``unwanted``: the gateway has no use for it. Then a cancel or an outcome is on its way here, and if it is not
        after all, the run begins again.
        """
        self._now = now
        entry = self._placed(worker, request_id, attempt)
        if entry is not None:
            entry.again_at = now + self.config.retry_ms * (1.0 if unwanted else 0.1)
        return []

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(
        self, entry: Entry, reason: FinishReason, now: float, *, message: str = "", result: RunResult | None = None
    ) -> list[Effect]:
        if entry.stage is Stage.ENDING:
            return []
        effects: list[Effect] = []
        if entry.stage is Stage.PLACED and result is None and entry.worker is not None and entry.attempt is not None:
            effects.append(CancelRun(entry.worker, entry.request_id, entry.attempt))
        self._waiting.pop(entry.request_id, None)
        request = None if entry.task is None else entry.task.request
        completed = reason in _COMPLETED
        entry.stage = Stage.ENDING
        entry.outcome = Outcome(
            epoch=self.epoch,
            request_id=entry.request_id,
            reason=reason,
            message=message[:4096],
            token_ids=result.token_ids if result is not None and completed else (),
            logprobs=result.logprobs if result is not None and completed else None,
            attempt=entry.attempt if result is not None else None,
            digest=b"" if request is None else request.digest,
            keyed=request is not None and request.keyed,
            prompt_tokens=0 if request is None else len(request.prompt_ids),
            task_type="" if entry.task is None else entry.task.task_type,
            worker=(entry.worker or "") if result is not None else "",
            queue_ms=max(0.0, entry.placed_ms - request.accepted_ms) if request and entry.placed_ms else 0.0,
            approximated=result.approximated if result is not None and completed else 0.0,
        )
        return effects + self._append_outcome(entry, now)

    def _append_outcome(self, entry: Entry, now: float) -> list[Effect]:
        assert entry.outcome is not None
        if entry.outcome.epoch != self.epoch:
            entry.outcome = msgspec.structs.replace(entry.outcome, epoch=self.epoch)
        entry.asked_ms, entry.appending = now, entry.outcome
        return [Append(entry.outcome)]

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Whatever is due; to be called several times in a ``retry_ms``."""
        self._now = now
        if self.role is Role.STANDBY:
            return []
        if self.role is Role.CLAIMING:
            due = self._claim_sent is None and now - self._claimed_at >= self.config.retry_ms
            return self._claim(now) if due else []
        effects: list[Effect] = []
        if self._claim_sent is None and now - self._claimed_at >= self.config.reclaim_ms:
            effects += self._claim(now)
        for worker in [seat.worker for seat in self.seats.values() if now >= seat.lease_until]:
            effects += self._lose(worker, now)
        self._begin_if_listed(now)
        effects += self._due(now)
        for request_id in list(itertools.takewhile(lambda known: self._finished[known] <= now, self._finished)):
            del self._finished[request_id]
        return effects + self.schedule(now)

    def _begin_if_listed(self, now: float) -> None:
        """A worker that has not answered within a lease is mute by now."""
        known = not self._expected_workers and all(seat.listed for seat in self.seats.values())
        if self.role is Role.LISTING and (known or now >= self._listing_until):
            self.role = Role.ACTIVE

    def _due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        late: dict[str, list[Entry]] = {}
        for entry in list(self.entries.values()):
            overdue = entry.appending is None and now - entry.asked_ms >= self.config.retry_ms
            match entry.stage:
                case Stage.ENDING:
                    if overdue:
                        effects += self._append_outcome(entry, now)
                case Stage.BURYING:
                    pass  # whoever writes the dead letter tries until it is written
                case Stage.LOSING:
                    if overdue and entry.worker is not None:
                        late.setdefault(entry.worker, []).append(entry)
                case Stage.WAITING | Stage.PLACED:
                    effects += self._timely(entry, now)
        for worker, entries in late.items():
            effects += self._append_lost(worker, entries, now)
        return effects

    def _timely(self, entry: Entry, now: float) -> list[Effect]:
        if entry.task is None:
            return []
        request = entry.task.request
        if now >= request.deadline_ms:
            return self._end(entry, FinishReason.EXPIRED, now, message="it was not finished by its deadline")
        waited = now - request.accepted_ms
        if entry.stage is Stage.WAITING and not entry.begun and waited >= self.config.max_queue_wait_ms:
            message = f"it has waited {waited / 1000:.1f} s, longer than is allowed here"
            return self._end(entry, FinishReason.SHED, now, message=message)
        seat = self.seats.get(entry.worker) if entry.worker is not None else None
        if entry.again_at is not None and now >= entry.again_at and seat is not None:
            return self._run(entry, seat, now)
        return []

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raises AssertionError, saying which, where an invariant does not hold."""
        waiting = {key for key, entry in self.entries.items() if entry.stage is Stage.WAITING and entry.task}
        assert waiting == set(self._waiting), "the queue holds exactly what waits"
        placed: dict[str, str] = {}
        for seat in self.seats.values():
            for request_id in seat.placed:
                assert request_id not in placed, f"{request_id} is on {placed[request_id]} and on {seat.worker}"
                placed[request_id] = seat.worker
        for request_id, entry in self.entries.items():
            if entry.stage is Stage.PLACED:
                assert placed.get(request_id) == entry.worker, f"{request_id} is not where it was placed"
                assert entry.attempt is not None, f"{request_id} is placed without an attempt"
                assert entry.attempt.epoch <= self.epoch, f"{request_id} runs under an epoch that is not held"
        offsets = [offset for entry in self.entries.values() for offset in entry.offsets]
        assert len(offsets) == len(set(offsets)) == self.tracker.open, "every open offset belongs to one request"


_COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
_TOO_LARGE = "what it generated is larger than the journal takes; ask for fewer tokens or fewer log-probabilities"
_SHED: Mapping[str, str] = {
    "expired": "its deadline passed while it waited",
    "unservable": "it needs more KV memory than any worker has",
    "saturated": "there is no room for it",
}


def _without_tokens(outcome: Outcome) -> Outcome:
    """What takes the place of an outcome that the journal refuses."""
    return msgspec.structs.replace(
        outcome, reason=FinishReason.FAILED, message=_TOO_LARGE, token_ids=(), logprobs=None, approximated=0.0
    )


def _needs_its_run(entry: Entry) -> bool:
    """Whether what its worker has of it is of use. Of one that ends it is where that is its outcome's text, for another
    scheduler may have to write the outcome."""
    return entry.stage is not Stage.ENDING or (entry.outcome is not None and entry.outcome.attempt is not None)


def _needs_its_gateway(entry: Entry) -> str | None:
    """The gateway whose client alone the request is for; None where a key may bring a client back."""
    if entry.task is None or entry.task.request.keyed or entry.stage not in (Stage.WAITING, Stage.PLACED):
        return None
    return entry.task.request.reply_to


def _given_up(entry: Entry) -> str:
    return f"given up after {len(entry.losses)} workers were lost while they ran it"


def _estimates_ms(
    waiting: Iterable[PendingRequest], views: Iterable[WorkerView], place: Collection[Placement], now: float
) -> dict[str, dict[str, float]]:
    """By request and estimator, in the order in which they are placed. Nothing where a worker's costs are unknown."""
    requests = {request.request_id: request for request in waiting} if place else {}
    workers = {view.worker: view for view in views}
    joined: dict[str, list[PendingRequest]] = {}
    found: dict[str, dict[str, float]] = {}
    for placement in place:
        view, request = workers[placement.worker], requests[placement.request_id]
        before = joined.setdefault(placement.worker, [])
        known = ESTIMATORS if view.costs.generated_ms(1) > 0 else {}
        found[request.request_id] = {
            name: latency_ms(estimator, view, before, request, now) for name, estimator in known.items()
        }
        before.append(request)
    return found
