"""What a pool's scheduler knows: its role, its requests and its workers. The rules in the files beside it act on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from enum import Enum

from greenroom.core.attempts import Attempt
from greenroom.core.journal import JournalFold
from greenroom.core.messages import Claim
from greenroom.fabric.committable_offsets import PrefixTracker
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.due_times import DueTimes
from greenroom.scheduler.effects import Effect, Run
from greenroom.scheduler.pool_workers import PoolWorker
from greenroom.scheduler.request_entries import Entry, RequestStage


class Role(Enum):
    """What this scheduler is to its pool."""

    STANDBY = "standby"
    """It holds nothing. It may be reading the journal before a take-over."""
    CLAIMING = "claiming"
    """Its claim is on the way."""
    LISTING = "listing"
    """Its claim stands. It learns what the workers run before it starts anything."""
    ACTIVE = "active"


class PoolState:
    """The state, and where a request is moved to: onto a worker, off it, back into the queue.

    Times are Unix milliseconds on a clock that never jumps. All but ``counts`` begins anew with ``stand_by``.
    """

    def __init__(self, scheduler: str, config: PoolConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self.counts: dict[str, int] = {}
        """How often each thing happened, for metrics."""
        self.stand_by()

    def stand_by(self, journal_start: int = 0, tasks_position: int = 0) -> None:
        """Hold nothing. The journal is read from ``journal_start`` on, tasks from ``tasks_position``."""
        self.role = Role.STANDBY
        self.epoch = -1
        self.fold = JournalFold(journal_start)
        self.tracker = PrefixTracker(tasks_position)
        self.entries: dict[str, Entry] = {}
        self.due = DueTimes()
        """When each entry is to be looked at again, at the latest."""
        self.input_bytes = 0
        """Of all entries."""
        self.workers: dict[str, PoolWorker] = {}
        self.waiting: dict[str, Entry] = {}
        """Requests on no worker, in the order of their arrival."""
        self.finished: dict[str, float] = {}
        """Requests that have ended, and until when each is remembered."""
        self.early_losses: dict[str, set[Attempt]] = {}
        """Losses that were read before the task of their request."""
        self.early_unsure: dict[str, set[Attempt]] = {}
        """The same, of losses that are unsure."""
        self.expected_workers: set[str] = set()
        """Members of the pool that have not said yet what they run."""
        self.listing_until = 0.0
        self.claimed_at = self.held_since = self.now = 0.0
        self.claim_sent: Claim | None = None
        """The claim whose append has not ended."""
        self.attempts = itertools.count()
        self.orders = itertools.count()

    @property
    def holds(self) -> bool:
        """Whether this scheduler's claim stands."""
        return self.role in (Role.LISTING, Role.ACTIVE)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def due_ms(self, entry: Entry) -> float:
        """When time will next bring something to it, as it stands; infinite: never."""
        match entry.stage:
            case RequestStage.ENDING | RequestStage.LOSING:
                return math.inf if entry.appending is not None else entry.asked_ms + self.config.retry_ms
            case RequestStage.WAITING | RequestStage.PLACED if entry.task is not None:
                request = entry.task.request
                due = float(request.deadline_ms)
                if entry.stage is RequestStage.WAITING and not entry.begun:
                    due = min(due, request.accepted_ms + self.config.max_queue_wait_ms)
                return due if entry.again_at is None else min(due, entry.again_at)
        return math.inf

    def watch(self, entry: Entry) -> None:
        """To be called wherever something may be due earlier than before."""
        self.due.at(entry.request_id, self.due_ms(entry))

    def place(self, entry: Entry, worker: PoolWorker, now: float) -> list[Effect]:
        """Run the request on the worker."""
        self.waiting.pop(entry.request_id, None)
        entry.stage, entry.worker, entry.placed_ms = RequestStage.PLACED, worker.name, now
        worker.placed[entry.request_id] = entry
        return self.run(entry, worker)

    def run(self, entry: Entry, worker: PoolWorker) -> list[Effect]:
        """Call Run. Each call has an attempt of its own: a run that exists is attached to and relabelled (rule 3)."""
        assert entry.task is not None
        entry.attempt = Attempt(self.epoch, next(self.attempts))
        entry.again_at = None
        self.watch(entry)
        return [Run(worker.name, entry.attempt, entry.task)]

    def wait(self, entry: Entry) -> None:
        """Take the request off its worker and queue it again, at the place that its arrival gives it."""
        self.wait_all([entry])

    def wait_all(self, entries: Collection[Entry]) -> None:
        """The same for many. Sorts once."""
        last = next(reversed(self.waiting.values()), None)
        newest = -1 if last is None else last.order
        in_order = True
        for entry in entries:
            self.unplace(entry)
            entry.stage = RequestStage.WAITING
            self.waiting[entry.request_id] = entry
            self.watch(entry)
            in_order, newest = in_order and entry.order > newest, max(newest, entry.order)
        if not in_order:
            self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].order))

    def unplace(self, entry: Entry) -> None:
        """Take the request off its worker and out of the queue."""
        self.waiting.pop(entry.request_id, None)
        worker = self.workers.get(entry.worker) if entry.worker is not None else None
        if worker is not None:
            worker.placed.pop(entry.request_id, None)
            if worker.alone == entry.request_id:
                worker.alone = None
        entry.worker = entry.attempt = entry.again_at = None
        entry.estimates_ms = {}

    def audit(self) -> None:
        """Raises AssertionError, naming the invariant, where one does not hold."""
        waiting = {key for key, entry in self.entries.items() if entry.stage is RequestStage.WAITING and entry.task}
        assert waiting == set(self.waiting), "the queue holds exactly what waits"
        placed: dict[str, str] = {}
        for worker in self.workers.values():
            for request_id in worker.placed:
                assert request_id not in placed, f"{request_id} is on {placed[request_id]} and on {worker.name}"
                placed[request_id] = worker.name
        for request_id, entry in self.entries.items():
            if entry.stage is RequestStage.PLACED:
                assert placed.get(request_id) == entry.worker, f"{request_id} is not where it was placed"
                assert entry.attempt is not None, f"{request_id} is placed without an attempt"
                assert entry.attempt.epoch <= self.epoch, f"{request_id} runs under an epoch that is not held"
            assert self.due.of(request_id) <= self.due_ms(entry), f"{request_id} is due before it is looked at"
        assert len(self.due) <= len(self.entries), "only what is here is due"
        held = sum(entry.task.input_bytes for entry in self.entries.values() if entry.task is not None)
        assert self.input_bytes == held, "bytes are those of the entries"
        offsets = [offset for entry in self.entries.values() for offset in entry.offsets]
        assert len(offsets) == len(set(offsets)) == self.tracker.open, "every open offset belongs to one request"
