"""The scheduler's state machine, driven by hand."""

from __future__ import annotations

from greenroom.core.generation import FinishReason, SamplingParams
from greenroom.core.messages import Cancel, JournalRecord, Outcome, Rejected, Request, Task
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.effects import Append, Effect, Run
from greenroom.scheduler.pool import Listed, Pool
from greenroom.scheduler.pool_workers import Capacity, WorkerState
from greenroom.scheduler.request_entries import RunResult

CONFIG = PoolConfig(max_waiting=4, lease_ms=100, retry_ms=50, reclaim_ms=10_000, max_queue_wait_ms=5_000)
DONE = RunResult(FinishReason.LENGTH, 3, (7, 8))


class Bench:
    """A pool, its journal, and what it wants. Appends land when told to."""

    def __init__(self, config: PoolConfig = CONFIG, *, active: bool = True) -> None:
        self.now = 1_000_000.0
        self.pool = Pool("me", config, FcfsPlacement())
        self.journal: list[JournalRecord] = []
        self.pending: list[JournalRecord] = []
        self.wanted: list[Effect] = []
        self.tasks = 0
        if active:
            self.take_over()

    def take_over(self) -> None:
        self.pool.take_over(0, self.tasks)
        self.do(self.pool.claim(self.now))
        self.land()
        self.do(self.pool.tick(self.now))

    def do(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Append):
                self.pending.append(effect.record)
        self.wanted += effects
        self.pool.audit()
        return effects

    def land(self) -> None:
        """All appends become visible, and what these lead to."""
        while self.pending:
            record = self.pending.pop(0)
            self.read(record)
            self.end(record)

    def end(self, record: JournalRecord, *, refused: bool = False) -> list[Effect]:
        """Its append has come to its end, whether it landed or not."""
        return self.do(self.pool.append_ended(record, self.now, refused=refused))

    def fail(self) -> None:
        """No append that is on its way lands, as far as is known."""
        records, self.pending = self.pending, []
        for record in records:
            self.end(record)

    def read(self, record: JournalRecord) -> list[Effect]:
        self.journal.append(record)
        return self.do(self.pool.journal(len(self.journal) - 1, record, self.now))

    def worker(self, name: str = "w", runs: list[Listed] | None = None, *, max_running: int = 2) -> None:
        capacity = Capacity(max_running=max_running, max_queued=0, kv_tokens=1000)
        self.do(self.pool.worker_reached(name, capacity, self.now))
        self.do(self.pool.listed(name, runs or [], self.now))

    def task(
        self,
        name: str = "r",
        *,
        tokens: int = 2,
        deadline_ms: float = 60_000,
        keyed: bool = False,
        reply_to: str | None = None,
    ) -> list[Effect]:
        request = Request(
            request_id=name,
            keyed=keyed,
            reply_to=reply_to,
            pool=0,
            model="m",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=tokens),
            accepted_ms=int(self.now),
            deadline_ms=int(self.now + deadline_ms),
        )
        return self.record(Task(request=request, task_type="t"))

    def record(self, record: Task | Cancel | Rejected) -> list[Effect]:
        self.tasks += 1
        return self.do(self.pool.task(self.tasks - 1, record, self.now))

    def pass_ms(self, ms: float, *, alive: tuple[str, ...] = ()) -> list[Effect]:
        effects: list[Effect] = []
        end = self.now + ms
        while self.now < end:
            self.now = min(end, self.now + 20)
            for worker in alive:
                effects += self.do(self.pool.beat(worker, WorkerState(), self.now))
            effects += self.do(self.pool.tick(self.now))
        return effects

    def last_run(self, request_id: str = "r") -> Run:
        return [e for e in self.wanted if isinstance(e, Run) and e.task.request.request_id == request_id][-1]

    def outcomes(self) -> list[Outcome]:
        return [record for record in self.journal if isinstance(record, Outcome)]
