"""A pool's schedulers, workers and gateways in simulated time, with everything that can go wrong between them.

The protocol's state machines are the real ones; the broker, the calls and what generates are models of a few lines.
Messages are late, overtake each other and get lost; processes crash and are paused; a broken append may land long
after its process was given up. What is generated differs from attempt to attempt, so that a text mixed from two of
them shows.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Finished, FinishReason, SamplingParams, Slo, Token
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import Cancel, JournalRecord, Outcome, Request, Task, TaskRecord
from greenroom.gateway.pipeline.stream_book import Diverged, Gap, StreamBook, Unwanted
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.policies.placement.placement_policy import Costs, PlacementPolicy
from greenroom.scheduler import effects as wanted
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.pool import Listed, Pool
from greenroom.scheduler.pool_state import Role
from greenroom.scheduler.pool_workers import Capacity, WorkerState
from greenroom.scheduler.request_entries import RunResult
from greenroom.worker.runs import run_table

EPOCH_MS = 1_000_000.0
LENGTH = 6
PROMPT = 3
LEASE_MS = 300.0
SILENT_MS = 600.0
"""For so long a gateway may be silent."""
GRACE_MS = 900.0
CONFIG = PoolConfig(
    max_waiting=64, max_queue_wait_ms=60_000, lease_ms=LEASE_MS, retry_ms=200, reclaim_ms=1_500, remember_ms=120_000
)


@dataclass
class Faults:
    """How often what goes wrong, as probabilities of one message or one tenth of a second. ``slow_append``: of an
    append to the journal that takes many times as long as the scheduler waits before it tries anything again;
    ``refuse``: of a request whose outcome the journal does not take with its tokens."""

    lose: float = 0.0
    slow: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    lose_append: float = 0.0
    slow_append: float = 0.0
    refuse: float = 0.0
    hand_over: float = 0.0
    hush: float = 0.0
    """A gateway goes on, but is not heard on ``members``."""


@dataclass
class Client:
    """One that waits at a gateway. ``end``: the outcome's reason, or why there is none. ``retried``: it has come again
    under its key."""

    request: Request
    gateway: Gateway
    tokens: list[int] = field(default_factory=list)
    end: str | None = None
    accepted: bool = False
    cancelled: bool = False
    retried: bool = False


class Node:
    """A process. What was sent to one that has crashed is gone; to one that is paused it comes when it wakes."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.alive = True
        self.paused_until = 0.0

    def later(self, delay: float, do: Callable[[], object], *, dropped: Callable[[], object] | None = None) -> None:
        """``dropped``: done instead where this process has crashed by then."""
        life = self.life

        def run() -> None:
            if not self.alive or self.life != life:
                if dropped is not None:
                    dropped()
            elif self.world.now < self.paused_until:
                self.world.at(self.paused_until, run)
            else:
                do()

        self.world.at(self.world.now + delay, run)

    def every(self, period: float, do: Callable[[], object]) -> None:
        def again() -> None:
            do()
            self.later(period * self.world.random.uniform(0.8, 1.2), again)

        self.later(self.world.random.uniform(0, period), again)

    def tell(self, other: Node, do: Callable[[], object], *, lost: Callable[[], object] | None = None) -> None:
        """A message. ``lost``: what the sender notices some time after it did not arrive."""
        world = self.world
        life = other.life
        delay = world.random.uniform(0.2, 3.0)
        if world.random.random() < world.faults.slow:
            delay *= world.random.uniform(10, 200)
        arrives = world.random.random() >= world.faults.lose

        def fail() -> None:
            if lost is not None:
                self.later(world.random.uniform(1, 50), lost)

        def deliver() -> None:
            if arrives and other.alive and other.life == life:
                other.later(0.0, do, dropped=fail)
            else:
                fail()

        world.at(world.now + delay, deliver)

    def crash(self, back_after: float) -> None:
        self.alive = False
        self.life += 1
        self.world.log(f"{self.name} crashes")
        self.world.at(self.world.now + back_after, self._restart)

    def _restart(self) -> None:
        self.alive = True
        self.paused_until = 0.0
        self.start()

    def start(self) -> None:
        raise NotImplementedError


class Scheduler(Node):
    """Carries out a Pool's effects. Holds the partition when the world says so."""

    def start(self) -> None:
        self.pool = self.world.make_pool(f"{self.name}.{self.life}", CONFIG, self.world.make_policy())
        self.replay_to: int | None = None
        self.position = self.next_task = 0
        self.holding = False
        self.generation = -1
        self.connections: dict[str, int] = {}
        self.pool_life = 0
        self.flying: set[object] = set()
        self.every(10, self._poll)
        self.every(30, self._tick)
        self.every(60, self._commit)

    def assigned(self) -> None:
        self.holding, self.generation = True, self.world.generation
        self._take_over()

    def _take_over(self) -> None:
        world = self.world
        self.next_task = world.committed
        since = world.task_times[world.committed] if world.committed < len(world.tasks) else world.now
        start = next((i for i, at in enumerate(world.journal_times) if at >= since - 2_000), len(world.journal))
        self.pool.take_over(start, self.next_task)
        self.pool_life += 1
        self.position, self.replay_to = start, len(world.journal)
        self.connections = {}

    def revoked(self) -> None:
        self.holding = False
        self.replay_to = None
        self.pool.release()

    def _poll(self) -> None:
        world = self.world
        if self.holding and not self._holds:
            self.revoked()  # it learns of it when it next polls, also where it has come back to it since
        if world.holder is self and not self.holding:
            self.assigned()
        if self.replay_to is None and self.pool.role is Role.STANDBY:
            return
        while self.position < len(world.journal):
            offset = self.position
            self.position += 1
            self._do(self.pool.journal(offset, world.journal[offset], world.now))
            if self.replay_to is not None and self.position >= self.replay_to:
                break
        if self.replay_to is not None and self.position >= self.replay_to:
            self.replay_to = None
            for worker in world.workers:
                if worker.alive:
                    self.pool.expect_worker(worker.instance)
            self._do(self.pool.claim(world.now))
        while self.pool.wants_tasks and self.next_task < len(world.tasks):
            offset = self.next_task
            self.next_task += 1
            self._do(self.pool.task(offset, world.tasks[offset], world.now))

    def _tick(self) -> None:
        if self.pool.role is Role.STANDBY:
            return
        for worker in self.world.workers:
            if worker.alive and worker.instance not in self.connections and self.pool.epoch >= 0:
                self._connect(worker)
        for instance in list(self.pool.workers):
            if self.world.dead.get(instance, self.world.now) < self.world.now - 100:
                self._do(self.pool.worker_gone(instance, self.world.now))
        for gateway in self.pool.gateways:
            if self.world.now - self.world.heard.get(gateway, self.world.now) > SILENT_MS:
                self.world.given_up.add(gateway)
                self._do(self.pool.gateway_gone(gateway, self.world.now))
        self._do(self.pool.tick(self.world.now))
        self.pool.audit()

    @property
    def _holds(self) -> bool:
        """Whether the group's coordinator would take a commit of it: not of an assignment that is over."""
        return self.world.holder is self and self.generation == self.world.generation

    def _commit(self) -> None:
        if self._holds and self.holding and self.pool.role in (Role.LISTING, Role.ACTIVE):
            position = self.pool.tracker.position
            assert position >= self.world.committed, "commits go forward"
            self.world.committed = position

    # The lease: a worker asks, is granted, asks again. ``connections`` has a number for each.
    def _connect(self, worker: Worker) -> None:
        number = self.connections[worker.instance] = next(self.world.numbers)
        instance, caller = worker.instance, self._caller()

        def hello() -> None:
            if worker.instance == instance:
                worker.connected(self, number, caller)

        self.tell(worker, hello, lost=lambda: self._disconnected(instance, number))

    def _disconnected(self, instance: str, number: int) -> None:
        if self.connections.get(instance) == number:
            del self.connections[instance]

    def told(self, worker: Worker, number: int, said: WorkerState) -> None:
        """Between two requests for the lease: what it executes has changed. A stream keeps its order."""
        if self.connections.get(worker.instance) == number and worker.instance in self.pool.workers:
            self._do(self.pool.beat(worker.instance, said, self.world.now))

    def lease_asked(self, worker: Worker, number: int, asked_at: float, first: bool, said: WorkerState) -> None:
        instance = worker.instance
        if self.connections.get(instance) != number or self.pool.epoch < 0:
            return
        now = self.world.now
        if first:
            self._do(self.pool.worker_reached(instance, self.world.capacity, now))
        elif instance not in self.pool.workers:
            return
        if not first or self.world.arranges:
            self._do(self.pool.beat(instance, said, now))
        caller = self._caller()
        self.tell(
            worker,
            lambda: worker.granted(self, number, caller, asked_at + LEASE_MS),
            lost=lambda: self._disconnected(instance, number),
        )

    def _do(self, effects: list[wanted.Effect]) -> None:
        for effect in effects:
            match effect:
                case wanted.Append(record):
                    self._append(record)
                case wanted.WriteDeadLetter(request_id):
                    self._write_dead_letter(request_id)
                case wanted.ListRuns(worker):
                    self._list(worker)
                case wanted.Run(worker, attempt, task):
                    self._run(worker, attempt, task)
                case wanted.CancelRun(worker, request_id, attempt) | wanted.Release(worker, request_id, attempt):
                    node = self.world.by_instance(worker)
                    if node is not None:
                        self.tell(node, lambda n=node, i=request_id, a=attempt: n.do(n.table.cancel(i, a)))  # type: ignore[misc]
                case wanted.Disconnect(worker):
                    self.connections.pop(worker, None)
                case wanted.Deposed():
                    # The scheduler that really holds the partition takes over again.
                    self.holding = False

    def _append(self, record: JournalRecord) -> None:
        """One append of a record at a time, whatever becomes of it."""
        what = record.request_id if isinstance(record, Outcome) else record
        flight = (self.pool.scheduler, self.pool_life, what)
        assert flight not in self.flying, f"{what} is appended while an append of it is on its way"
        self.flying.add(flight)

        def ended(refused: bool) -> None:
            self.flying.discard(flight)
            self._do(self.pool.append_ended(record, self.world.now, refused=refused))

        self.world.append_journal(self, record, ended)

    def _write_dead_letter(self, request_id: str) -> None:
        self.world.dead_letters.append(request_id)
        self.later(2, lambda: self._do(self.pool.dead_letter_written(request_id, self.world.now)))

    def _caller(self) -> run_table.Caller:
        return run_table.Caller(self.pool.epoch, self.pool.scheduler, "journal", named=True)

    def _list(self, instance: str) -> None:
        node, caller = self.world.by_instance(instance), self._caller()
        if node is None:
            return

        def answer() -> None:
            if node.instance != instance:
                return
            try:
                node.do(node.table.meet(caller, self.world.now))
                listed = [Listed(*run) for run in node.table.list_runs(caller.epoch)]
            except run_table.RunRefused:
                node.tell(self, again)
                return
            node.tell(self, lambda: self._do(self.pool.listed(instance, listed, self.world.now)), lost=broken)

        retry = self.pool.epoch

        def again() -> None:
            if self.pool.epoch >= retry >= 0 and instance in self.pool.workers:  # it may have claimed anew meanwhile
                self._list(instance)

        def broken() -> None:
            """The call ended without an answer, which is noticed here."""
            self.later(5, again)

        self.tell(node, answer, lost=again)

    def _run(self, instance: str, attempt: Attempt, task: Task) -> None:
        node, caller, request_id = self.world.by_instance(instance), self._caller(), task.request.request_id

        def broken() -> None:
            self._do(self.pool.broken(instance, request_id, attempt, self.world.now))

        if node is None:
            self.later(5, broken)
            return

        def call() -> None:
            if node.instance != instance:
                node.tell(self, broken)
            else:
                node.called(self, caller, attempt, task)

        self.tell(node, call, lost=broken)

    def answered(self, instance: str, request_id: str, attempt: Attempt, answer: Any) -> None:
        now = self.world.now
        match answer:
            case RunResult():
                self._do(self.pool.result(instance, request_id, attempt, answer, now))
            case run_table.RunRefused() if answer.refusal is not run_table.Refusal.STALE:
                self._do(self.pool.refused(instance, request_id, attempt, now, back_off_ms=20))
            case run_table.Closing.GIVEN_BACK:
                self._do(self.pool.given_back(instance, request_id, attempt, now))
            case _:
                unwanted = answer is run_table.Closing.UNWANTED
                self._do(self.pool.broken(instance, request_id, attempt, now, unwanted=unwanted))


class Worker(Node):
    """Carries out a RunTable's effects; a step is a token of every run."""

    def start(self) -> None:
        self.instance = f"{self.name}.{self.life}"
        self.table = self.world.make_table()
        self.generating: dict[int, tuple[Task, list[int]]] = {}
        self.calls: dict[tuple[str, Attempt], tuple[Scheduler, int]] = {}
        self.streams: dict[tuple[str, Attempt], object] = {}
        self.connection: tuple[Scheduler, int] | None = None
        self.batch: list[int] = []
        self.said_until = 0.0
        self.every(7, self._step)
        self.every(50, self._tick)

    def _tick(self) -> None:
        for (request_id, attempt), (scheduler, life) in list(self.calls.items()):
            if not scheduler.alive or scheduler.life != life:  # its connections are closed
                del self.calls[request_id, attempt]
                self.table.hung_up(request_id, attempt, self.world.now)
        self.do(self.table.tick(self.world.now))

    def crash(self, back_after: float) -> None:
        self.world.dead[self.instance] = self.world.now
        super().crash(back_after)

    # the lease
    def connected(self, scheduler: Scheduler, number: int, caller: run_table.Caller) -> None:
        try:
            self.do(self.table.meet(caller, self.world.now))
        except run_table.RunRefused:
            return
        self.connection = (scheduler, number)
        self._ask(scheduler, number, True)

    def _ask(self, scheduler: Scheduler, number: int, first: bool) -> None:
        if self.connection != (scheduler, number):
            return
        asked_at, said = self.world.now, self._state()
        self.tell(
            scheduler,
            lambda: scheduler.lease_asked(self, number, asked_at, first, said),
            lost=lambda: self._ask(scheduler, number, first),
        )

    def _state(self) -> WorkerState:
        costs = self.world.costs
        if not self.world.arranges:
            generated = {
                request_id: len(run.tokens) if run.wanted else 0 for request_id, run in self.table.runs.items()
            }
            return WorkerState(costs=costs, generated=generated)
        executing = frozenset(
            self.generating[number][0].request.request_id for number in self.batch if number in self.generating
        )
        self.world.named.setdefault(self.instance, set()).update(executing)
        return WorkerState(costs=costs, executing=executing)

    def _next_batch(self) -> list[int]:
        """Two at a time, until both have ended. The scheduler is told before they begin; it may hear of it late."""
        self.batch = [number for number in self.batch if number in self.generating]
        if not self.batch and self.generating:
            self.batch = list(self.generating)[:2]
            if self.connection is not None:
                (scheduler, number), said, instance = self.connection, self._state(), self.instance
                late = self.world.random.uniform(0.1, 2.0)
                if self.world.random.random() < self.world.faults.slow:
                    late *= 20
                self.said_until = max(self.said_until, self.world.now + late)

                def tell() -> None:
                    if scheduler.alive and self.instance == instance:
                        scheduler.told(self, number, said)

                self.world.at(self.said_until, tell)
        return self.batch

    def granted(self, scheduler: Scheduler, number: int, caller: run_table.Caller, until: float) -> None:
        if self.connection != (scheduler, number):
            return
        try:
            self.do(self.table.meet(caller, self.world.now))
            self.do(self.table.renew(caller.epoch, until, self.world.now))
        except run_table.RunRefused:
            return
        self.later(LEASE_MS / 4, lambda: self._ask(scheduler, number, False))

    # runs
    def called(self, scheduler: Scheduler, caller: run_table.Caller, attempt: Attempt, task: Task) -> None:
        request_id = task.request.request_id
        self.calls[request_id, attempt] = (scheduler, scheduler.life)
        try:
            self.do(self.table.meet(caller, self.world.now))
            self.do(self.table.call(caller.epoch, attempt, task))
        except run_table.RunRefused as refusal:
            self._answer(request_id, attempt, refusal)
        if self.world.random.random() < self.world.faults.lose:
            self.later(self.world.random.uniform(5, 200), lambda: self._hang_up(request_id, attempt))

    def _hang_up(self, request_id: str, attempt: Attempt) -> None:
        if (request_id, attempt) in self.calls:
            self.table.hung_up(request_id, attempt, self.world.now)
            self._answer(request_id, attempt, None)

    def _answer(self, request_id: str, attempt: Attempt, answer: Any) -> None:
        call = self.calls.pop((request_id, attempt), None)
        if call is None:
            return
        scheduler = call[0]
        instance = self.instance

        def lost() -> None:
            self.table.hung_up(request_id, attempt, self.world.now)
            self.world.at(
                self.world.now + 5,
                lambda: scheduler.later(0, lambda: scheduler.answered(instance, request_id, attempt, None)),
            )

        self.tell(scheduler, lambda: scheduler.answered(instance, request_id, attempt, answer), lost=lost)

    def _step(self) -> None:
        for number in self._next_batch() if self.world.arranges else list(self.generating):
            if number not in self.generating:
                continue
            task, ids = self.generating[number]
            if task.request.model == "poison" and len(ids) >= 2:
                self.crash(self.world.random.uniform(50, 400))
                return
            if len(ids) < LENGTH:
                ids.append(self.world.random.randrange(1_000_000))
                token = Token(len(ids) - 1, ids[-1])
                emit = self.table.token(number, token, self.world.now)
                if emit is not None:
                    self.do([emit])
            if len(ids) >= LENGTH:
                del self.generating[number]
                why = self.world.random.choice((FinishReason.LENGTH, FinishReason.STOP))
                done = Finished(why, PROMPT, LENGTH)
                self.do(self.table.ended(number, done, self.world.now))
        self.table.audit()

    def do(self, effects: list[run_table.Effect]) -> None:
        for effect in effects:
            match effect:
                case run_table.Open(request_id, attempt, reply_to):
                    self._open(request_id, attempt, reply_to)
                case run_table.Start(number, task, prefix):
                    self.world.started(task.request.request_id)
                    self.generating[number] = (task, [token.token_id for token in prefix])
                case run_table.Stop(number):
                    self.generating.pop(number, None)
                case run_table.Emit(request_id, attempt, tokens):
                    assert self.table.holds_lease(self.world.now), "emitted without a lease"
                    self._emit(request_id, attempt, tokens)
                case run_table.Report(_, request_id, attempt, finished, tokens):
                    ids = tuple(token.token_id for token in tokens)
                    result = RunResult(FinishReason(finished.reason.value), finished.prompt_tokens, ids)
                    self._answer(request_id, attempt, result)
                case run_table.Close(request_id, attempt, why):
                    self.streams.pop((request_id, attempt), None)
                    self._answer(request_id, attempt, why)

    # tokens
    def _open(self, request_id: str, attempt: Attempt, reply_to: str | None) -> None:
        gateway = self.world.gateway_of(reply_to)
        if gateway is None:
            self.later(1, lambda: self.do(self.table.no_stream(request_id, attempt)))
            return
        stream = object()
        self.streams[request_id, attempt] = stream

        def again() -> None:
            if self.streams.get((request_id, attempt)) is stream:
                self._open(request_id, attempt, reply_to)

        def answer() -> None:
            had = gateway.book.open(request_id, attempt, stream)

            def told() -> None:
                if self.streams.get((request_id, attempt)) is not stream:
                    return
                if isinstance(had, Unwanted):
                    self._turned_away(request_id, attempt, had)
                else:
                    self.do(self.table.opened(request_id, attempt, had, self.world.now))

            gateway.tell(self, told, lost=lambda: None)
            # A lost answer is noticed here by its deadline.
            self.later(400, lambda: again() if self.table_opening(request_id, attempt) else None)

        self.tell(gateway, answer, lost=again)

    def _turned_away(self, request_id: str, attempt: Attempt, why: Unwanted) -> None:
        self.streams.pop((request_id, attempt), None)
        if why is Unwanted.NO_STREAM:
            self.do(self.table.no_stream(request_id, attempt))
        else:
            self.do(self.table.unwanted(request_id, attempt))

    def table_opening(self, request_id: str, attempt: Attempt) -> bool:
        run = self.table.runs.get(request_id)
        return run is not None and run.attempt == attempt and run.stream is run_table._Stream.OPENING

    def _emit(self, request_id: str, attempt: Attempt, tokens: tuple[Token, ...]) -> None:
        stream = self.streams.get((request_id, attempt))
        gateway = self.world.gateway_of(self.table.runs[request_id].task.request.reply_to)
        if stream is None or gateway is None:
            return

        def again() -> None:
            if self.streams.get((request_id, attempt)) is stream:
                self.do(self.table.stream_broken(request_id, attempt))

        def turned_away(why: Unwanted) -> None:
            if self.streams.get((request_id, attempt)) is stream:
                self._turned_away(request_id, attempt, why)

        def add() -> None:
            try:
                new = gateway.book.add(request_id, stream, tokens)
            except Gap:
                gateway.tell(self, again, lost=lambda: None)
                return
            if isinstance(new, Unwanted):
                gateway.tell(self, lambda: turned_away(new))
            else:
                gateway.give(request_id, [token.token_id for token in new])

        self.tell(gateway, add, lost=again)


class Gateway(Node):
    """Clients, and the journal's outcomes for them."""

    def start(self) -> None:
        self.instance = f"{self.name}.{self.life}"
        self.book = self.world.make_book()
        self.clients: dict[str, Client] = {}
        self.fold = self.world.make_fold()
        self.position = 0
        self.ended: dict[str, Outcome] = {}
        self.hushed_until = 0.0
        self.world.heard[self.instance] = self.world.now
        self.every(8, self._poll)
        self.every(20, self._announce)

    def _announce(self) -> None:
        if self.world.now >= self.hushed_until:
            self.world.heard[self.instance] = self.world.now

    def crash(self, back_after: float) -> None:
        for client in self.clients.values():
            client.end = "connection lost"
        super().crash(back_after)

    def submit(self, request: Request) -> Client:
        client = Client(request, self)
        self.world.clients.append(client)
        if request.request_id in self.ended:  # a retry, which gets what its key stands for
            client.tokens = list(self.ended[request.request_id].token_ids)
            client.end = self.ended[request.request_id].reason.value
            return client
        self.clients[request.request_id] = client
        self.book.expect(request.request_id)
        life = self.life

        def acknowledged(known: bool) -> None:
            if self.life != life or client.end is not None:
                return
            if known:
                client.accepted = True
                self.world.accepted.add(request.request_id)
            elif self.book.opened(request.request_id):
                client.accepted = True  # a worker has it, so it was taken
            elif request.keyed:
                client.end = "unknown"
                self.book.disown(request.request_id)
            else:
                client.end = "unknown"
                self.book.forget(request.request_id)
                self._cancel(request.request_id)

        task = Task(request=request, task_type="unknown")
        self.world.append_task(self, task, acknowledged)
        return client

    def retry(self, client: Client) -> None:
        """It was told that it is unknown, and asks again under its key, here."""
        request_id = client.request.request_id
        if client.end == "unknown" and request_id not in self.book:
            client.retried = True
            self.submit(msgspec.structs.replace(client.request, reply_to=self.instance))

    def cancel(self, client: Client) -> None:
        """The client has gone. Under a key its request goes on without it."""
        if client.end is not None:
            return
        client.end = "left"
        if client.request.keyed:
            return
        client.cancelled = True
        self.book.forget(client.request.request_id)
        self._cancel(client.request.request_id)

    def _cancel(self, request_id: str) -> None:
        """Until it is acknowledged."""

        def acknowledged(known: bool) -> None:
            if not known:
                self._cancel(request_id)

        self.world.append_task(self, Cancel(request_id=request_id, pool=0, deadline_ms=1), acknowledged)

    def give(self, request_id: str, ids: list[int]) -> None:
        client = self.clients[request_id]
        assert client.end in (None, "left")
        client.tokens += ids

    def _poll(self) -> None:
        while self.position < len(self.world.journal):
            record = self.world.journal[self.position]
            verdict = self.fold.read(self.position, record)
            self.position += 1
            if not isinstance(record, Outcome) or verdict is not Verdict.COUNTS or record.request_id in self.ended:
                continue
            self.ended[record.request_id] = record
            if record.request_id not in self.book:
                continue
            client = self.clients[record.request_id]
            try:
                rest = self.book.end(record, [Token(i, token) for i, token in enumerate(record.token_ids)])
            except Diverged as error:
                raise AssertionError(str(error)) from error
            client.tokens += [token.token_id for token in rest]
            client.end = client.end or record.reason.value


class World:
    """All of it, from one seed."""

    def __init__(self, seed: int, faults: Faults, *, schedulers: int = 2, workers: int = 2, gateways: int = 2) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now = EPOCH_MS
        self.numbers = itertools.count()
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.tasks: list[TaskRecord] = []
        self.task_times: list[float] = []
        self.journal: list[JournalRecord] = []
        self.journal_times: list[float] = []
        self.committed = 0
        self.dead_letters: list[str] = []
        self.dead: dict[str, float] = {}
        self.heard: dict[str, float] = {}
        self.given_up: set[str] = set()
        """Gateways whose requests a scheduler has ended."""
        self.clients: list[Client] = []
        self.accepted: set[str] = set()
        self.starts: dict[str, int] = {}
        self.refuse = faults.refuse
        self.too_large: dict[str, bool] = {}
        self.history: list[str] = []
        self.holder: Scheduler | None = None
        self.generation = 0
        """Of the group: how often the partition was given to another."""
        self.make_table: Callable[[], run_table.RunTable] = lambda: run_table.RunTable(grace_ms=GRACE_MS, max_runs=6)
        self.make_book: Callable[[], StreamBook] = StreamBook
        self.make_fold: Callable[[], JournalFold] = JournalFold
        self.make_pool: type[Pool] = Pool
        self.make_policy: Callable[[], PlacementPolicy] = FcfsPlacement
        self.costs = Costs()
        self.capacity = Capacity(max_running=2, max_queued=1, kv_tokens=10_000)
        self.arranges = False
        """Workers take many requests, execute two at a time, and say which."""
        self.named: dict[str, set[str]] = {}
        """What each worker has ever said to be executing."""
        self.slos: tuple[Slo, ...] = (Slo(),)
        self.schedulers = [Scheduler(self, f"scheduler{i}") for i in range(schedulers)]
        self.workers = [Worker(self, f"worker{i}") for i in range(workers)]
        self.gateways = [Gateway(self, f"gateway{i}") for i in range(gateways)]

    @property
    def nodes(self) -> list[Node]:
        return [*self.schedulers, *self.workers, *self.gateways]

    def begin(self) -> None:
        for node in self.nodes:
            node.start()
        self.holder = self.schedulers[0]
        self.at(self.now + 100, self._mischief)

    def log(self, line: str) -> None:
        self.history.append(f"{self.now - EPOCH_MS:9.1f} {line}")

    def at(self, when: float, do: Callable[[], object]) -> None:
        heapq.heappush(self.queue, (when, next(self.numbers), do))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self.queue)
            do()
        self.now = until

    def started(self, request_id: str) -> None:
        self.starts[request_id] = self.starts.get(request_id, 0) + 1

    def by_instance(self, instance: str) -> Worker | None:
        return next((w for w in self.workers if w.alive and w.instance == instance), None)

    def gateway_of(self, instance: str | None) -> Gateway | None:
        """None: it is certain that there is no such gateway (any more)."""
        return next((g for g in self.gateways if g.alive and g.instance == instance), None)

    def request(
        self, gateway: Gateway, name: str, *, poison: bool = False, keyed: bool = False, life_ms: float = 30_000
    ) -> Client:
        request = Request(
            request_id=name,
            pool=0,
            model="poison" if poison else "model",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=LENGTH),
            accepted_ms=int(self.now),
            deadline_ms=int(self.now + life_ms),
            slo=self.slos[len(self.clients) % len(self.slos)],
            keyed=keyed,
            reply_to=gateway.instance,
        )
        return gateway.submit(request)

    # -- the broker ----------------------------------------------------------------------------------------------

    def append_task(self, sender: Node, record: TaskRecord, acknowledged: Callable[[bool], None] | None) -> None:
        def land() -> None:
            self.tasks.append(record)
            self.task_times.append(self.now)

        # What a crash between append and commit upstream does: the same record twice.
        for _ in range(2 if self.random.random() < self.faults.lose else 1):
            self._append(sender, land, acknowledged)
            acknowledged = None

    def append_journal(self, sender: Node, record: JournalRecord, ended: Callable[[bool], None]) -> None:
        """``ended``: told when its append has come to its end, and whether it was refused."""

        def land() -> None:
            self.journal.append(record)
            self.journal_times.append(self.now)

        if isinstance(record, Outcome) and record.token_ids and self.refuses(record.request_id):
            sender.later(self.random.uniform(0.3, 4.0), lambda: ended(True))
            return
        slow = self.random.uniform(1, 6) * CONFIG.retry_ms if self.random.random() < self.faults.slow_append else 0.0
        self._append(sender, land, lambda known: ended(False), slow=slow)

    def refuses(self, request_id: str) -> bool:
        """Whether the journal takes its outcome for too large: the same for every attempt."""
        if request_id not in self.too_large:
            self.too_large[request_id] = self.random.random() < self.refuse
        return self.too_large[request_id]

    def _append(
        self,
        sender: Node,
        land: Callable[[], None],
        acknowledged: Callable[[bool], None] | None,
        *,
        slow: float = 0.0,
    ) -> None:
        delay = self.random.uniform(0.3, 4.0) + slow
        fate = self.random.random()
        if fate < self.faults.lose_append:
            if acknowledged is not None:
                unknown = acknowledged
                sender.later(50, lambda: unknown(False))
            if fate < self.faults.lose_append / 2:
                return  # lost; else it lands late, though its sender has given it up
            delay *= self.random.uniform(20, 400)
            acknowledged = None
        self.at(self.now + delay, land)
        if acknowledged is not None:
            known = acknowledged
            sender.later(delay + 1, lambda: known(True))

    # -- what goes wrong -----------------------------------------------------------------------------------------

    def _mischief(self) -> None:
        for node in self.nodes:
            if not node.alive:
                continue
            if self.random.random() < self.faults.crash:
                node.crash(self.random.uniform(20, 800))
            elif self.random.random() < self.faults.pause:
                node.paused_until = self.now + self.random.uniform(50, 4 * LEASE_MS)
                self.log(f"{node.name} pauses")
            if isinstance(node, Gateway) and self.random.random() < self.faults.hush:
                node.hushed_until = self.now + self.random.uniform(0.5, 3) * SILENT_MS
                self.log(f"{node.name} is not heard")
        self._assign()
        self.at(self.now + 100, self._mischief)

    def _assign(self) -> None:
        """The group's coordinator: a member that is silent loses the partition, though it may not know it yet."""
        holder = self.holder
        away = holder is None or not holder.alive or holder.paused_until > self.now + 200
        if away or self.random.random() < self.faults.hand_over:
            others = [s for s in self.schedulers if s.alive and s is not holder and s.paused_until <= self.now]
            if others:
                self.holder = self.random.choice(others)
                self.generation += 1
                self.log(f"{self.holder.name} gets the partition")

    def calm(self) -> None:
        """From now on nothing goes wrong."""
        self.faults = Faults()
