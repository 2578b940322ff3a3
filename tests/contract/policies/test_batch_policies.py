"""One suite for all batch policies: random arrivals, run to their ends on a pretended worker."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchLimits,
    BatchPolicy,
    BatchState,
    RunningSequence,
    WaitingSequence,
)
from greenroom.policies.registry import BATCH_POLICIES, create_batch_policy


@dataclass
class Life:
    """What is to become of a request: ``generates`` tokens, the first one out of the last chunk of its prompt."""

    sequence: int
    arrives: int
    prefill_left: int
    kv_need: int
    generates: int


class Worker:
    """Carries out decisions at once, one step after the other, and holds each against the contract."""

    def __init__(self, policy: BatchPolicy, limits: BatchLimits, lives: list[Life]) -> None:
        self.policy = policy
        self.limits = limits
        self.to_come = sorted(lives, key=lambda life: (life.arrives, life.sequence))
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.refused: set[int] = set()
        self.finished: list[int] = []
        self.admitted: list[int] = []
        self.decisions: list[BatchDecision] = []
        self.now = 0

    @property
    def kv_free(self) -> int:
        return self.limits.kv_total - sum(life.kv_need for life in self.running)

    def turn(self) -> None:
        while self.to_come and self.to_come[0].arrives <= self.now:
            self.waiting.append(self.to_come.pop(0))
        state = BatchState(
            tuple(WaitingSequence(life.sequence, life.prefill_left, life.kv_need) for life in self.waiting),
            tuple(RunningSequence(life.sequence, life.prefill_left) for life in self.running),
            self.kv_free,
            self.limits,
        )
        decision = self.policy.decide(state)
        assert self.policy.decide(state) == decision, "equal states, unequal decisions"
        self.decisions.append(decision)
        self._carry_out(decision)
        self.now += 1

    def _carry_out(self, decision: BatchDecision) -> None:
        waiting = {life.sequence: life for life in self.waiting}
        for sequence, why in decision.refuse:
            assert waiting.pop(sequence).kv_need > self.limits.kv_total
            assert why
            self.refused.add(sequence)
        for sequence in decision.admit:
            self.running.append(waiting.pop(sequence))
            self.admitted.append(sequence)
        self.waiting = [life for life in self.waiting if life.sequence in waiting]
        assert self.kv_free >= 0
        assert len(self.running) <= self.limits.max_running
        moved: set[int] = set()
        for plan in decision.steps:
            assert 0 < plan.tokens <= self.limits.tokens_per_step
            running = {life.sequence: life for life in self.running}
            assert len({part.sequence for part in plan.rows}) == len(plan.rows), "one sequence twice in a step"
            for part in plan.rows:
                life = running[part.sequence]
                moved.add(part.sequence)
                if part.phase is Phase.PREFILL:
                    assert 1 <= part.tokens <= life.prefill_left
                    assert self.limits.prefill_chunk is None or part.tokens <= self.limits.prefill_chunk
                    life.prefill_left -= part.tokens
                    life.generates -= life.prefill_left == 0
                else:
                    assert (part.phase, part.tokens, life.prefill_left) == (Phase.DECODE, 1, 0)
                    life.generates -= 1
                if life.prefill_left == 0 and life.generates <= 0:
                    self.finished.append(part.sequence)
            self.running = [life for life in self.running if life.sequence not in self.finished]
        assert set(decision.admit) <= moved, "admitted without a row"


@st.composite
def workloads(draw: st.DrawFn) -> tuple[BatchLimits, list[Life]]:
    max_running = draw(st.integers(1, 5))
    limits = BatchLimits(
        tokens_per_step=draw(st.integers(max_running, 12)),
        max_running=max_running,
        kv_total=draw(st.integers(10, 60)),
        prefill_chunk=draw(st.none() | st.integers(1, 6)),
    )
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25), st.integers(1, 8), st.integers(0, 30)), max_size=15)
    )
    return limits, [
        Life(number, arrives, prefill, prefill + generates + spare, generates)
        for number, (arrives, prefill, generates, spare) in enumerate(shapes)
    ]


every_policy = pytest.mark.parametrize("name", sorted(BATCH_POLICIES))


@every_policy
@settings(deadline=None)
@given(workload=workloads())
def test_limits_hold_and_every_request_ends_or_is_refused(name: str, workload: tuple[BatchLimits, list[Life]]) -> None:
    limits, lives = workload
    worker = Worker(create_batch_policy(name), limits, lives)
    # In each turn with work at least one token moves, so there is an end that can be computed.
    work = sum(life.prefill_left + life.generates for life in lives)
    turns = 21 + work

    for _ in range(turns):
        worker.turn()

    fitting = {life.sequence for life in lives if life.kv_need <= limits.kv_total}
    assert set(worker.finished) == fitting
    assert worker.refused == {life.sequence for life in lives} - fitting
    assert (worker.running, worker.waiting) == ([], [])


@settings(deadline=None)
@given(workload=workloads())
def test_fcfs_admits_in_order_of_arrival(workload: tuple[BatchLimits, list[Life]]) -> None:
    limits, lives = workload
    in_order = [life.sequence for life in sorted(lives, key=lambda life: (life.arrives, life.sequence))]
    worker = Worker(create_batch_policy("fcfs"), limits, lives)

    for _ in range(200):
        worker.turn()

    arrival = {sequence: position for position, sequence in enumerate(in_order)}
    assert worker.admitted == sorted(worker.admitted, key=arrival.__getitem__)


@settings(deadline=None)
@given(workload=workloads())
def test_fcfs_moves_every_decoding_sequence_in_every_step(workload: tuple[BatchLimits, list[Life]]) -> None:
    limits, lives = workload
    worker = Worker(create_batch_policy("fcfs"), limits, lives)

    for _ in range(60):
        decoding = {life.sequence for life in worker.running if life.prefill_left == 0}
        worker.turn()

        rows = [part for plan in worker.decisions[-1].steps for part in plan.rows]
        assert {part.sequence for part in rows if part.phase is Phase.DECODE} == decoding
