"""A simulated worker: the engine's own batching policy, and steps that take as long as was measured.

``KvOnDemandWorker`` batches as vLLM does. It admits a request when its prompt fits, and KV grows block by block. When
no block is left it preempts the latest request, which begins again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.emoe.scheduling.jobs import Job
from benchmarks.emoe.scheduling.step_costs import ExpertSets, ServingOverhead
from greenroom.core.step_costs import StepCosts
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchLimits,
    BatchState,
    Rows,
    RunningSequence,
    StepPlan,
    WaitingSequence,
)
from greenroom.policies.batching.fcfs import FcfsBatching


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. ``prefill``: rows before its next token; after a preemption also its own tokens."""

    number: int
    job: Job
    prefill: int
    generated: int = 0
    first_ms: float | None = None
    begun_ms: float | None = None

    @property
    def kv_need(self) -> int:
        return self.job.input_tokens + self.job.max_tokens - 1

    @property
    def done(self) -> bool:
        return self.generated >= self.job.output_tokens

    @property
    def context(self) -> int:
        return self.job.input_tokens + self.generated


@dataclass(eq=False)
class ModelledWorker:
    """``now`` is the caller's. ``until``: when the step in progress ends; infinite if none is.

    Loads are upfront, as in Eq. 3: the next step begins when a new request's experts are here.
    """

    name: str
    limits: BatchLimits
    costs: StepCosts
    sets: ExpertSets | None = None
    overhead: ServingOverhead = field(default_factory=ServingOverhead)
    until: float = math.inf
    waiting: dict[str, Sequence] = field(default_factory=dict)
    running: dict[str, Sequence] = field(default_factory=dict)
    busy_ms: float = 0.0
    steps: int = 0
    step_rows: int = 0
    """Sequences in steps, over all steps."""
    loaded: int = 0
    """Experts brought."""
    preempted: int = 0
    _stall_ms: float = 0.0
    _plan: StepPlan | None = None
    _batching: FcfsBatching = field(default_factory=FcfsBatching)
    _numbers: dict[int, Sequence] = field(default_factory=dict)
    _count: int = 0
    _loads: dict[str, float] | None = None

    def add(self, job: Job) -> Sequence:
        sequence = Sequence(self._count, job, job.input_tokens)
        self._count += 1
        self.waiting[job.request_id] = sequence
        self._numbers[sequence.number] = sequence
        self._bring()
        return sequence

    def mix(self) -> dict[str, float]:
        """Tokens of the requests here by their label: prompts, and the expected answers."""
        found: dict[str, float] = {}
        if self.sets is not None:
            for sequence in (*self.running.values(), *self.waiting.values()):
                label = sequence.job.label
                found[label] = (
                    found.get(label, 0.0) + sequence.job.input_tokens + self.sets.profile.expected_tokens(label)
                )
        return found

    def load_ms_by_task(self) -> dict[str, float]:
        """ΔE of one more request of each task type."""
        if self._loads is None:
            self._loads = {} if self.sets is None else self.sets.load_ms_by_task(self.mix())
        return self._loads

    def _bring(self) -> None:
        self._loads = None
        if self.sets is not None and not self.sets.everything:
            brought = self.sets.bring(self.mix())
            costs = self.sets.profile.costs
            self.loaded += brought
            self._stall_ms += costs.load_ms(brought) if costs is not None else 0.0

    def begin_step(self, now: float) -> None:
        """The next forward, where there is something to run and none runs."""
        if self._plan is not None:
            return
        plan = self._next_plan()
        if plan is None:
            return
        for rows in plan.rows:
            sequence = self._numbers[rows.sequence]
            if sequence.begun_ms is None:
                sequence.begun_ms = now
        took = self._stall_ms + self._step_ms(plan) + self.overhead.of_step(len(plan.rows))
        self.steps += 1
        self.step_rows += len(plan.rows)
        self._stall_ms = 0.0
        self._plan, self.until = plan, now + took
        self.busy_ms += took

    def _step_ms(self, plan: StepPlan) -> float:
        decode = sum(rows.tokens for rows in plan.rows if rows.phase is Phase.DECODE)
        return self.costs.step_ms(decode, plan.tokens - decode)

    def _next_plan(self) -> StepPlan | None:
        kv_used = sum(sequence.kv_need for sequence in self.running.values())
        decision = self._batching.decide(
            BatchState(
                waiting=tuple(
                    WaitingSequence(one.number, one.prefill, one.kv_need) for one in self.waiting.values()
                ),
                running=tuple(RunningSequence(one.number, one.prefill) for one in self.running.values()),
                kv_free=self.limits.kv_total - kv_used,
                limits=self.limits,
            )
        )  # fmt: skip
        if decision.refuse:
            raise ValueError(f"the scheduler placed what can never run: {decision.refuse}")
        for number in decision.admit:
            request_id = self._numbers[number].job.request_id
            self.running[request_id] = self.waiting.pop(request_id)
        return decision.steps[0] if decision.steps else None

    def end_step(self, now: float) -> list[Sequence]:
        """The step is over; the sequences that it finished."""
        assert self._plan is not None
        plan, self._plan, self.until = self._plan, None, math.inf
        finished = []
        for rows in plan.rows:
            sequence = self._numbers[rows.sequence]
            if rows.phase is Phase.PREFILL:
                sequence.prefill -= rows.tokens
                if sequence.prefill > 0:
                    continue
            sequence.generated += 1
            if sequence.first_ms is None:
                sequence.first_ms = now
            if sequence.done:
                self._loads = None
                finished.append(sequence)
                del self.running[sequence.job.request_id], self._numbers[sequence.number]
        return finished


@dataclass(eq=False)
class KvOnDemandWorker(ModelledWorker):
    """FCFS as in vLLM (Kwon et al., SOSP 2023, section 4.5): KV blocks on demand.

    The latest request is preempted with all its blocks and recomputed. Admission leaves a hundredth of the blocks free.
    """

    block: int = 16

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def add(self, job: Job) -> Sequence:
        if self._blocks(job.input_tokens + job.output_tokens) > self.limits.kv_total // self.block:
            raise ValueError(f"{job.request_id} can never run: it does not fit the KV memory")
        return super().add(job)

    def _next_plan(self) -> StepPlan | None:
        total = self.limits.kv_total // self.block
        self._preempt(total)
        left = self.limits.tokens_per_step
        rows: list[Rows] = []
        for one in self.running.values():
            if one.prefill == 0 and left:
                rows.append(Rows(one.number, 1, Phase.DECODE))
                left -= 1
        for one in self.running.values():
            if one.prefill and left:
                left -= self._take(rows, one, left)
        used = sum(self._blocks(one.context) for one in self.running.values())
        for request_id, one in list(self.waiting.items()):
            need = self._blocks(one.prefill)
            spare = 0 if not self.running else total // 100
            if not left or len(self.running) >= self.limits.max_running or used + need > total - spare:
                break
            used += need
            self.running[request_id] = self.waiting.pop(request_id)
            left -= self._take(rows, one, left)
        return StepPlan(tuple(rows)) if rows else None

    def _preempt(self, total: int) -> None:
        while len(self.running) > 1 and self._wanted_blocks() > total:
            request_id, latest = next(reversed(self.running.items()))
            del self.running[request_id]
            latest.prefill = latest.context
            self.waiting = {request_id: latest, **self.waiting}
            self.preempted += 1

    def _wanted_blocks(self) -> int:
        """After the next step, in which each of them may get a token."""
        return sum(self._blocks(one.context + 1) for one in self.running.values())

    def _take(self, rows: list[Rows], one: Sequence, left: int) -> int:
        tokens = min(one.prefill, left, self.limits.prefill_chunk or one.prefill)
        rows.append(Rows(one.number, tokens, Phase.PREFILL))
        return tokens
