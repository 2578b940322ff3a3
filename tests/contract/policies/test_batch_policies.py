"""One suite for all batch policies: random arrivals, run to their ends on a pretended worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchLimits,
    BatchPolicy,
    BatchState,
    RunningSequence,
    SequencePaths,
    StepCosts,
    WaitingSequence,
)
from greenroom.policies.registry import BATCH_POLICIES, create_batch_policy, spelt

TURN_MS = 10.0
MOST_SECONDS = 0.1
MOST_HOLD = 2.0
EXPERTS = 24


@dataclass
class Life:
    """What is to become of a request: ``generates`` tokens, the first one out of the last chunk of its prompt."""

    sequence: int
    arrives: int
    prefill_left: int
    kv_need: int
    generates: int
    slo_ttft_ms: float | None = None


@dataclass
class Workload:
    limits: BatchLimits
    lives: list[Life]
    costs: StepCosts
    paths_seed: int | None = None
    """None: nothing foretells paths."""


class Worker:
    """Carries out decisions at once, one step after the other, and holds each against the contract."""

    def __init__(self, policy: BatchPolicy, workload: Workload) -> None:
        lives = workload.lives
        self.policy = policy
        self.limits = replace(workload.limits, plans_rounds=policy.plans_rounds)
        if policy.plans_rounds:  # so that several forwards are needed
            self.limits = replace(self.limits, max_running=3 * workload.limits.max_running)
        self.random = None if workload.paths_seed is None else np.random.default_rng(workload.paths_seed)
        self.costs = workload.costs
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
            tuple(
                WaitingSequence(
                    life.sequence,
                    life.prefill_left,
                    life.kv_need,
                    waited_ms=(self.now - life.arrives) * TURN_MS,
                    slo_ttft_ms=life.slo_ttft_ms,
                )
                for life in self.waiting
            ),
            tuple(RunningSequence(life.sequence, life.prefill_left) for life in self.running),
            self.kv_free,
            self.limits,
            self.costs,
            *self._foretold(),
        )
        decision = self.policy.decide(state)
        assert self.policy.decide(state) == decision, "equal states, unequal decisions"
        self.decisions.append(decision)
        self._carry_out(decision)
        self.now += 1

    def _foretold(self) -> tuple[SequencePaths | None, np.ndarray | None]:
        """Of all that decode, and now and then of one that waits; and what is resident."""
        if self.random is None:
            return None, None
        told = [life.sequence for life in self.running if life.prefill_left == 0]
        told += [life.sequence for life in self.waiting[: self.random.integers(2)]]
        chances = (self.random.random((len(told), EXPERTS)) ** 4).astype(np.float32)
        chances.setflags(write=False)
        resident = self.random.random(EXPERTS) < self.random.choice([0.3, 1.0])
        resident.setflags(write=False)
        return SequencePaths(np.array(told, dtype=np.int64), chances), resident

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
        decoding = [part.sequence for plan in decision.steps for part in plan.rows if part.phase is Phase.DECODE]
        assert not [each for each, count in Counter(decoding).items() if count > 1], "two decode rows in a round"
        for plan in decision.steps:
            assert 0 < plan.tokens <= self.limits.tokens_per_step
            decode_rows = sum(part.phase is Phase.DECODE for part in plan.rows)
            assert decode_rows <= (self.limits.rows_per_forward or self.limits.tokens_per_step)
            running = {life.sequence: life for life in self.running}
            assert len({part.sequence for part in plan.rows}) == len(plan.rows), "one sequence twice in a step"
            for part in plan.rows:
                life = running[part.sequence]
                moved.add(part.sequence)
                if part.phase is Phase.PREFILL:
                    assert 1 <= part.tokens <= life.prefill_left
                    if self.policy.applies_prefill_chunk and self.limits.prefill_chunk is not None:
                        assert part.tokens <= self.limits.prefill_chunk
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
def workloads(draw: st.DrawFn) -> Workload:
    max_running = draw(st.integers(1, 5))
    tokens_per_step = draw(st.integers(max_running, 12))
    limits = BatchLimits(
        tokens_per_step=tokens_per_step,
        max_running=max_running,
        kv_total=draw(st.integers(10, 60)),
        prefill_chunk=draw(st.none() | st.integers(1, 6)),
        rows_per_forward=draw(st.none() | st.integers(1, min(3, tokens_per_step))),
    )
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 20), st.integers(1, 25), st.integers(1, 8), st.integers(0, 30),
                st.none() | st.floats(1, 500),
            ),
            max_size=15,
        )
    )  # fmt: skip
    seconds = st.none() | st.floats(0, MOST_SECONDS)
    lives = [
        Life(number, arrives, prefill, prefill + generates + spare, generates, slo)
        for number, (arrives, prefill, generates, spare, slo) in enumerate(shapes)
    ]
    return Workload(
        limits,
        lives,
        StepCosts(draw(st.none() | st.floats(0, MOST_SECONDS / 12)), draw(seconds), draw(seconds)),
        draw(st.none() | st.integers(0, 99)),
    )


every_policy = pytest.mark.parametrize(
    "name",
    [
        *sorted(BATCH_POLICIES),
        "phases:apart=true",
        "phases:hold=0.5",
        f"phases:apart=true,hold={MOST_HOLD}",
        "token-scheduler:literal=true",
        "token-scheduler:force=true,seed=3",
    ],
)


def made(text: str) -> BatchPolicy:
    name, options = spelt("batching", text)
    return create_batch_policy(name, options=options)


@every_policy
@settings(deadline=None)
@given(workload=workloads())
def test_limits_hold_and_every_request_ends_or_is_refused(name: str, workload: Workload) -> None:
    limits, lives = workload.limits, workload.lives
    worker = Worker(made(name), workload)
    # In each turn with work at least one token moves, so there is an end that can be computed. Where a prompt is held,
    # it is the token of one that decodes.
    work = sum(life.prefill_left + life.generates for life in lives)
    turns = 21 + work

    for _ in range(turns):
        worker.turn()

    fitting = {life.sequence for life in lives if life.kv_need <= limits.kv_total}
    assert set(worker.finished) == fitting
    assert worker.refused == {life.sequence for life in lives} - fitting
    assert (worker.running, worker.waiting) == ([], [])


@every_policy
@settings(deadline=None)
@given(workload=workloads())
def test_requests_are_admitted_in_order_of_arrival(name: str, workload: Workload) -> None:
    in_order = [life.sequence for life in sorted(workload.lives, key=lambda life: (life.arrives, life.sequence))]
    worker = Worker(made(name), workload)

    for _ in range(200):
        worker.turn()

    arrival = {sequence: position for position, sequence in enumerate(in_order)}
    assert worker.admitted == sorted(worker.admitted, key=arrival.__getitem__)


@every_policy
@settings(deadline=None)
@given(workload=workloads())
def test_every_decoding_sequence_moves_with_every_decision(name: str, workload: Workload) -> None:
    worker = Worker(made(name), workload)

    for _ in range(60):
        decoding = {life.sequence for life in worker.running if life.prefill_left == 0}
        worker.turn()

        rows = [part for plan in worker.decisions[-1].steps for part in plan.rows]
        assert {part.sequence for part in rows if part.phase is Phase.DECODE} == decoding


@every_policy
def test_decode_rows_that_one_forward_may_not_hold_run_in_as_few_of_equal_sizes(name: str) -> None:
    limits = BatchLimits(tokens_per_step=40, max_running=40, kv_total=0, rows_per_forward=4)
    running = tuple(RunningSequence(number, prefill_left=0) for number in range(10))

    steps = made(name).decide(BatchState((), running, 0, limits)).steps

    assert [plan.tokens for plan in steps] == [4, 3, 3]


def test_only_policies_that_plan_rounds_may_have_more_running_than_a_forward_has_rows() -> None:
    assert {name for name, made in BATCH_POLICIES.items() if made.plans_rounds} == {"token-scheduler"}
    with pytest.raises(InvalidConfig, match="max_running"):
        BatchLimits(tokens_per_step=4, max_running=5, kv_total=0)
    running = tuple(RunningSequence(number, prefill_left=0) for number in range(9))
    limits = BatchLimits(tokens_per_step=4, max_running=12, kv_total=0, plans_rounds=True)

    steps = made("token-scheduler").decide(BatchState((), running, 0, limits)).steps

    assert [plan.tokens for plan in steps] == [3, 3, 3]


@pytest.mark.parametrize("rows", [0, 11])
def test_the_bound_of_decode_rows_lies_from_one_to_the_rows_of_a_step(rows: int) -> None:
    with pytest.raises(InvalidConfig, match=r"rows_per_forward.*from 1 to tokens_per_step"):
        BatchLimits(tokens_per_step=10, max_running=4, kv_total=0, rows_per_forward=rows)
