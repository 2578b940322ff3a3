"""A pool's scheduler and its workers in simulated time.

A discrete-event simulation: requests arrive, steps end, the scheduler ticks, workers report with every beat. All that
decides is real: the placement policy, the pool worker as the policy sees it, and the engine's batching. The model gives
the time of a step (``step_costs.py``) and what a server takes beside it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.emoe.scheduling.jobs import Job
from benchmarks.emoe.scheduling.simulated_worker import KvOnDemandWorker, ModelledWorker
from benchmarks.emoe.scheduling.step_costs import ExpertSets, ServingOverhead
from greenroom.core.model_profile import MeasuredCosts, ModelProfile
from greenroom.policies.batching.batch_policy import BatchLimits
from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacementPolicy,
    PlacementState,
    WorkerView,
)
from greenroom.scheduler.estimates import Estimates
from greenroom.scheduler.pool_workers import Capacity, PoolWorker, WorkerState
from greenroom.scheduler.request_entries import Entry, RequestStage

VIRTUALLY_ALL = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is simulated. ``profile``: what the scheduler goes by. ``really``: what steps and loads take, where that was
    measured at another time than the profile.

    ``overhead``: what a server takes beside its engine. ``share``: of all experts that fit a worker. ``beat_ms``:
    between two reports of a worker; 0: the scheduler always knows. ``hindsight``: the scheduler is told each answer's
    true length. ``kv_on_demand``: workers batch as vLLM does. ``max_queue_wait_ms`` and ``timeout_ms``: as the pool's
    own.
    """

    profile: ModelProfile
    really: MeasuredCosts | None = None
    overhead: ServingOverhead = field(default_factory=ServingOverhead)
    workers: int = 1
    share: float = 1.0
    max_running: int = 32
    max_queued: int = 8
    kv_tokens: int = 65_536
    tokens_per_step: int = 512
    prefill_chunk: int | None = 256
    beat_ms: float = 750.0
    tick_ms: float = 50.0
    max_waiting: int = 1024
    max_queue_wait_ms: float = 120_000.0
    timeout_ms: float = 600_000.0
    hindsight: bool = False
    kv_on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """The end of a job, in milliseconds. ``reason``: why it was given up, or empty.

    ``estimates``: by estimator the latency from arrival that was expected when it was placed.
    """

    job: Job
    placed_ms: float | None
    first_ms: float | None
    end_ms: float | None
    reason: str = ""
    estimates: Mapping[str, float] | None = None

    @property
    def latency_ms(self) -> float | None:
        return None if self.end_ms is None else self.end_ms - self.job.at_ms

    @property
    def in_time(self) -> bool:
        """Answered within its SLO; without one any answer is."""
        if self.latency_ms is None:
            return False
        return self.job.slo_e2e_ms is None or self.latency_ms <= self.job.slo_e2e_ms


Estimate = Callable[[WorkerView, PendingRequest, float], Mapping[str, float]]
"""What each estimator expects of a request's latency from its arrival, as it joins that worker now."""


class Simulation:
    """One run. Invariants, checked at the end: every job has one end, and nothing is left on a worker."""

    def __init__(
        self,
        jobs: Sequence[Job],
        policy: PlacementPolicy,
        machine: Machine,
        expected: Callable[[Job], float],
        estimate: Estimate | None = None,
    ) -> None:
        costs = machine.profile.costs
        if costs is None:
            raise ValueError("the profile has no costs: make one with `greenroom profile`")
        self.jobs = jobs
        self.policy = policy
        self.machine = machine
        self.served: dict[str, Served] = {}
        self._expected = expected
        self._estimate = estimate
        steps = (machine.really or costs).steps()
        limits = BatchLimits(machine.tokens_per_step, machine.max_running, machine.kv_tokens, machine.prefill_chunk)
        kv = VIRTUALLY_ALL if machine.kv_on_demand else machine.kv_tokens  # then the worker alone looks after it
        capacity = Capacity(max_running=machine.max_running, max_queued=machine.max_queued, kv_tokens=kv)
        made = KvOnDemandWorker if machine.kv_on_demand else ModelledWorker
        names = [f"worker{number}" for number in range(machine.workers)]
        self.workers = {
            name: made(
                name, limits, steps, overhead=machine.overhead,
                sets=None if machine.share >= 1 else ExpertSets(machine.profile, machine.share),
            )
            for name in names
        }  # fmt: skip
        self.pool_workers = {name: PoolWorker(name, capacity, math.inf, listed=True) for name in names}
        self._waiting: dict[str, Entry] = {}
        self._by_id = {job.request_id: job for job in jobs}
        self._placed: dict[str, tuple[float, Mapping[str, float] | None]] = {}
        told = Estimates(machine.profile).costs(Costs(), missing=0.0, rows=machine.max_running)
        self._costs = replace(told, token_ms=told.token_ms_by_rows[-1])

    def run(self) -> list[Served]:
        """What became of each job, in their order."""
        order = itertools.count()
        arrivals = [(job.at_ms, next(order), job) for job in self.jobs]
        heapq.heapify(arrivals)
        next_tick = next_beat = 0.0
        while len(self.served) < len(self.jobs):
            stepping = min(self.workers.values(), key=lambda worker: worker.until)
            arrives = arrivals[0][0] if arrivals else math.inf
            ticks = next_tick if self._waiting else math.inf
            now = min(stepping.until, arrives, ticks)
            if math.isinf(now):
                raise RuntimeError(f"{len(self.jobs) - len(self.served)} jobs wait and nothing moves")
            if now >= next_beat and self.machine.beat_ms:
                self._beat(now)
                next_beat = now + self.machine.beat_ms
            if stepping.until <= now:
                self._step_over(stepping, now)
            elif arrives <= now:
                self._arrive(heapq.heappop(arrivals)[2], now)
            else:
                self._give_up_late(now)
                self._schedule(now)
            if (self._waiting and next_tick <= now) or not self._waiting:
                next_tick = now + self.machine.tick_ms
        assert not self._waiting
        assert not any(worker.running or worker.waiting for worker in self.workers.values())
        return [self.served[job.request_id] for job in self.jobs]

    def _arrive(self, job: Job, now: float) -> None:
        if len(self._waiting) >= self.machine.max_waiting:
            self.served[job.request_id] = Served(job, None, None, None, "queue full")
            return
        expected = job.output_tokens if self.machine.hindsight else round(self._expected(job))
        pending = PendingRequest(
            request_id=job.request_id,
            arrived_ms=now,
            input_tokens=job.input_tokens,
            kv_need=job.input_tokens + job.max_tokens - 1,
            expected_tokens=max(1, min(job.max_tokens, expected)),
            deadline_ms=now + self.machine.timeout_ms,
            task=job.label,
            slo_e2e_ms=job.slo_e2e_ms,
        )
        self._waiting[job.request_id] = Entry(job.request_id, len(self._placed), pending=pending)
        self._schedule(now)

    def _step_over(self, worker: ModelledWorker, now: float) -> None:
        finished = worker.end_step(now)
        for sequence in finished:
            request_id = sequence.job.request_id
            placed_ms, estimates = self._placed[request_id]
            del self.pool_workers[worker.name].placed[request_id]
            end_ms = now + self.machine.overhead.request_ms
            self.served[request_id] = Served(sequence.job, placed_ms, sequence.first_ms, end_ms, estimates=estimates)
        if finished:
            self._schedule(now)
        worker.begin_step(now)

    def _schedule(self, now: float) -> None:
        if not self._waiting:
            return
        pending = tuple(entry.pending for entry in self._waiting.values() if entry.pending is not None)
        if not self.machine.beat_ms:
            self._beat(now)
        for name, worker in self.workers.items():
            self.pool_workers[name].costs = replace(self._costs, load_ms_by_task=worker.load_ms_by_task())
        views = {name: pool_worker.view(now) for name, pool_worker in self.pool_workers.items()}
        decision = self.policy.decide(PlacementState(pending, tuple(views.values())), now)
        for shed in decision.shed:
            self._end(shed.request_id, shed.reason)
        for placement in decision.place:
            entry = self._waiting.pop(placement.request_id)
            entry.stage, entry.worker, entry.placed_ms = RequestStage.PLACED, placement.worker, now
            assert entry.pending is not None
            pool_worker, job = self.pool_workers[placement.worker], self._by_id[placement.request_id]
            said = None
            if self._estimate is not None:
                said = self._estimate(pool_worker.view(now), entry.pending, now)
            pool_worker.placed[placement.request_id] = entry
            self._placed[placement.request_id] = now, said
            self.workers[placement.worker].add(job)
        for worker in self.workers.values():
            worker.begin_step(now)

    def _beat(self, now: float) -> None:
        """Workers tell how far they are; between beats the pool workers reckon on from it."""
        for name, worker in self.workers.items():
            self.pool_workers[name].state = WorkerState(generated=self._generated(worker))
            self.pool_workers[name].heard_ms = now

    def _generated(self, worker: ModelledWorker) -> dict[str, int]:
        return {request_id: sequence.generated for request_id, sequence in worker.running.items()}

    def _give_up_late(self, now: float) -> None:
        """As the pool: what has waited too long is shed."""
        for entry in list(self._waiting.values()):
            assert entry.pending is not None
            if now - entry.pending.arrived_ms >= self.machine.max_queue_wait_ms:
                self._end(entry.request_id, "waited too long")

    def _end(self, request_id: str, reason: str) -> None:
        self._waiting.pop(request_id)
        self.served[request_id] = Served(self._by_id[request_id], None, None, None, reason)


def simulate(
    jobs: Sequence[Job],
    policy: PlacementPolicy,
    machine: Machine,
    expected: Callable[[Job], float] | None = None,
    estimate: Estimate | None = None,
) -> list[Served]:
    """The end of each job. ``expected``: tokens of an answer that the scheduler expects; by default the profile's for
    its label."""
    by_label = expected or (lambda job: machine.profile.expected_tokens(job.label))
    return Simulation(jobs, policy, machine, by_label, estimate).run()
