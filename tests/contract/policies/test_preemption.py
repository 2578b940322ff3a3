"""One suite for all batch policies: KV that grows with the sequences, on a pretended worker that counts every page."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from greenroom.policies.batching.preemption import MOST_PREEMPTIONS, make_room
from greenroom.policies.registry import BATCH_POLICIES, create_batch_policy, spelt


@dataclass
class Life:
    """A request of ``prompt`` and ``answer`` rows, of which ``expected`` are expected. A page is one row."""

    sequence: int
    arrives: int
    prompt: int
    answer: int
    expected: int
    rows: int = 0
    settled: int = 0
    generated: int = 0
    held: int = 0
    preempted: int = 0

    @property
    def most(self) -> int:
        return self.prompt + self.answer

    @property
    def need(self) -> int:
        if self.preempted >= MOST_PREEMPTIONS:
            return self.most
        return min(self.most, max(self.settled, self.prompt + self.expected))

    @property
    def prefill_left(self) -> int:
        return max(0, self.settled - self.rows)


class Worker:
    """Carries out decisions, and holds each against the contract."""

    def __init__(self, policy: BatchPolicy, limits: BatchLimits, lives: list[Life]) -> None:
        self.policy = policy
        self.limits = replace(limits, plans_rounds=policy.plans_rounds)
        self.to_come = sorted(lives, key=lambda life: (life.arrives, life.sequence))
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.finished: set[int] = set()
        self.now = 0

    @property
    def free(self) -> int:
        return self.limits.kv_total - sum(life.held for life in self.running)

    def turn(self) -> BatchDecision:
        while self.to_come and self.to_come[0].arrives <= self.now:
            life = self.to_come.pop(0)
            life.settled = life.prompt
            self.waiting.append(life)
        growing = {life.sequence: 1 for life in self.running if not life.prefill_left and life.rows == life.held}
        expected = sum(max(life.need - life.held, growing.get(life.sequence, 0)) for life in self.running)
        state = BatchState(
            tuple(WaitingSequence(life.sequence, life.settled, life.need) for life in self.waiting),
            tuple(
                RunningSequence(
                    life.sequence, life.prefill_left, kv_held=life.held, loss=life.rows, preempted=life.preempted
                )
                for life in self.running
            ),
            self.free,
            self.limits,
            kv_expected=expected,
            growing=growing,
        )
        decision = self.policy.decide(state)
        assert self.policy.decide(state) == decision, "equal states, unequal decisions"
        self._carry_out(decision, growing)
        self.now += 1
        return decision

    def _carry_out(self, decision: BatchDecision, growing: dict[int, int]) -> None:
        oldest = self.running[0] if self.running else None
        by_number = {life.sequence: life for life in self.running}
        assert not decision.refuse
        assert not (decision.preempt and decision.admit), "nobody starts where others give up their memory"
        for number in decision.preempt:
            life = by_number.pop(number)
            assert life is not oldest, "the one admitted longest ago"
            assert life.preempted < MOST_PREEMPTIONS
            life.preempted += 1
            life.settled, life.rows, life.held = life.prompt + life.generated, 0, 0
            self.running.remove(life)
            self.waiting = sorted([*self.waiting, life], key=lambda one: (one.arrives, one.sequence))
        planned = {part.sequence: part for plan in decision.steps for part in plan.rows}
        for number in growing.keys() & planned.keys():
            by_number[number].held += 1
        waits = [life.sequence for life in self.waiting]
        assert list(decision.admit) == waits[: len(decision.admit)], "in order of arrival"
        for number in decision.admit:
            life = self.waiting.pop(0)
            assert life.sequence == number
            life.held = life.most if life.preempted >= MOST_PREEMPTIONS else life.settled
            self.running.append(life)
            by_number[number] = life
        assert self.free >= 0, "more was given than there is"
        assert len(self.running) <= self.limits.max_running
        for number, part in planned.items():
            life = by_number[number]
            life.rows += part.tokens
            assert life.rows <= life.held, "a row without memory"
            assert (part.phase is Phase.DECODE) == (life.rows > life.settled)
            if not life.prefill_left:
                life.generated += 1
                if life.generated > life.answer:
                    self.finished.add(number)
        self.running = [life for life in self.running if life.sequence not in self.finished]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[BatchLimits, list[Life]]:
    total = draw(st.integers(12, 60))
    max_running = draw(st.integers(1, 6))
    limits = BatchLimits(
        tokens_per_step=draw(st.integers(max_running, 14)),
        max_running=max_running,
        kv_total=total,
        prefill_chunk=draw(st.none() | st.integers(1, 6)),
    )
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(0, 40), st.integers(1, 30)), max_size=12)
    )
    lives = [
        Life(number, arrives, prompt, min(answer, total - prompt), expected)
        for number, (arrives, prompt, answer, expected) in enumerate(shapes)
    ]
    return limits, lives


every_policy = pytest.mark.parametrize(
    "name", [*sorted(BATCH_POLICIES), "phases:apart=true", "phases:hold=0.5", "token-scheduler:force=true"]
)


def made(text: str) -> BatchPolicy:
    name, options = spelt("batching", text)
    return create_batch_policy(name, options=options)


@every_policy
@settings(deadline=None)
@given(workload=workloads())
def test_memory_holds_what_is_planned_and_every_request_ends(
    name: str, workload: tuple[BatchLimits, list[Life]]
) -> None:
    limits, lives = workload
    worker = Worker(made(name), limits, lives)
    # A request runs three times at most, and in each turn with work at least one row moves.
    turns = 21 + 3 * sum(life.most + 1 for life in lives)

    for _ in range(turns):
        worker.turn()

    assert worker.finished == {life.sequence for life in lives}
    assert worker.free == limits.kv_total


@every_policy
def test_the_one_that_loses_least_gives_up_its_memory(name: str) -> None:
    limits = BatchLimits(tokens_per_step=8, max_running=8, kv_total=100)
    running = tuple(
        RunningSequence(number, 0, kv_held=held, loss=held, preempted=preempted)
        for number, (held, preempted) in enumerate([(5, 0), (30, 0), (10, 2), (20, 0), (20, 0), (15, 2)])
    )

    decision = made(name).decide(BatchState((), running, 0, limits, kv_expected=1, growing={0: 1}))

    assert decision.preempt == (4,), "of equal ones the one admitted last"
    assert {part.sequence for plan in decision.steps for part in plan.rows} == {0, 1, 2, 3, 5}


@every_policy
def test_where_nobody_may_be_preempted_the_last_admitted_of_those_that_grow_have_no_row(name: str) -> None:
    limits = BatchLimits(tokens_per_step=8, max_running=8, kv_total=100)
    running = tuple(RunningSequence(number, 0, kv_held=20, loss=20, preempted=2) for number in range(4))
    waiting = (WaitingSequence(9, 1, 1),)
    state = BatchState(waiting, running, 1, limits, kv_expected=3, growing={0: 1, 2: 1, 3: 1})

    decision = made(name).decide(state)

    assert (decision.preempt, decision.admit) == ((), ())
    assert {part.sequence for plan in decision.steps for part in plan.rows} == {0, 1}


def test_where_the_next_rows_fit_nothing_changes() -> None:
    limits = BatchLimits(tokens_per_step=8, max_running=8, kv_total=100)
    running = (RunningSequence(0, 0, kv_held=20, loss=20), RunningSequence(1, 0, kv_held=20, loss=20))
    state = BatchState((), running, 2, limits, kv_expected=2, growing={0: 1, 1: 1})
    left, preempted = make_room(state)
    assert left is state
    assert preempted == ()
