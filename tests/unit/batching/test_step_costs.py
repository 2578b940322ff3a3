"""What a step costs, as measured, and what the policy is told of it and of the waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from greenroom.core.errors import TransferFailed
from greenroom.core.generation import Slo, Token
from greenroom.moe.batch.step_meter import StepMeter
from greenroom.policies.base.array_types import Mask
from greenroom.policies.batching.batch_policy import UNKNOWN_COSTS, BatchDecision, BatchPolicy, BatchState, StepCosts
from greenroom.policies.batching.fcfs import FcfsBatching
from tests.contract.batching.harness import Driver, request
from tests.unit.batching.fake_model import FakeModel, poisoned


@dataclass
class Moves:
    stall_seconds: float = 0.0
    missing: float | None = 2.0

    def missing_seconds(self) -> float | None:
        return self.missing

    def resident(self) -> Mask:
        return np.ones(3, dtype=np.bool_)


def ran(
    meter: StepMeter, seconds: float, prefill: int, decode: int, moves: Moves | None = None, stall: float = 0.0
) -> None:
    meter.begin()
    if moves is not None:
        moves.stall_seconds += stall
    meter.end(seconds, prefill_rows=prefill, decode_rows=decode)


def test_nothing_is_known_before_anything_ran() -> None:
    assert StepMeter().costs() == UNKNOWN_COSTS
    assert StepMeter(Moves()).costs() == StepCosts(moving_seconds=2.0)
    assert StepMeter(Moves(missing=None)).costs() == UNKNOWN_COSTS


def test_computing_is_what_a_step_did_not_wait_for_experts() -> None:
    moves = Moves(stall_seconds=100.0)
    meter = StepMeter(moves)
    ran(meter, 1.5, 90, 10, moves, stall=0.5)
    assert meter.costs().row_seconds == pytest.approx(0.01)
    assert meter.costs().balanced_rows == pytest.approx(200)


def test_steps_without_prompts_tell_what_rows_cost_from_what_a_step_costs() -> None:
    meter = StepMeter(Moves(missing=0.02))
    ran(meter, 0.0332, 16, 0)
    assert meter.costs().row_seconds == pytest.approx(0.0332 / 16), "not told apart yet"
    ran(meter, 0.0302, 0, 1)
    costs = meter.costs()
    assert costs.row_seconds == pytest.approx(0.0002)
    assert costs.fixed_seconds == pytest.approx(0.03)
    assert costs.balanced_rows == pytest.approx(150), "more than one prompt, though moving takes less than that"
    assert costs.prompt_step_seconds(150) == pytest.approx(0.06)


@pytest.mark.parametrize(("seconds", "rows"), [(0.5, 9), (2.0, 1)])
def test_steps_that_are_too_alike_or_dearer_without_prompts_tell_nothing_apart(seconds: float, rows: int) -> None:
    meter = StepMeter()
    ran(meter, 1.0, 10, 0)
    ran(meter, seconds, 0, rows)
    assert meter.costs() == StepCosts(row_seconds=0.1, decode_seconds=seconds)


def test_older_steps_are_forgotten() -> None:
    meter = StepMeter()
    ran(meter, 100.0, 100, 0)  # the first one compiles and allocates
    for _ in range(60):
        ran(meter, 1.0, 100, 0)
        ran(meter, 0.04, 0, 4)
    costs = meter.costs()
    assert costs.row_seconds == pytest.approx(0.01, rel=0.05)
    assert costs.decode_seconds == pytest.approx(0.04)


class Watching(BatchPolicy):
    def __init__(self, reads_waits: bool = False) -> None:
        self.reads_waits = reads_waits
        self.told: list[BatchState] = []

    def decide(self, state: BatchState) -> BatchDecision:
        self.told.append(state)
        return FcfsBatching().decide(state)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_policy_is_told_what_the_steps_before_have_cost() -> None:
    clock, policy, moves = Clock(), Watching(), Moves()

    def takes(seconds: float, stall: float) -> None:
        clock.now += seconds
        moves.stall_seconds += stall

    model = FakeModel(before=lambda chunks: takes(3.0, 1.0) if chunks[0].prefill else takes(0.5, 0.25))
    d = Driver(model.as_ragged(), policy=policy, clock=clock, moves=moves)
    d.add(request("a", (1, 2, 3, 4), 3))
    for _ in range(3):
        d.step()
    d.step()
    assert [state.costs for state in policy.told] == [
        StepCosts(None, 2.0, None),
        StepCosts(0.5, 2.0, None),
        StepCosts(0.5, 2.0, 0.5),
        StepCosts(0.5, 2.0, 0.5),
    ]
    assert d.engine.costs == policy.told[-1].costs


def test_a_step_that_failed_as_a_whole_is_not_measured() -> None:
    d = Driver(FakeModel(poisoned(60, TransferFailed("an expert is lost"))).as_ragged(), policy=Watching())
    for name, token in (("a", 5), ("b", 60)):
        d.add(request(name, (token, 6), 1))
    d.step()
    assert d.engine.stats.isolated_steps == 1
    d.step()
    assert d.engine.costs == UNKNOWN_COSTS


@pytest.mark.parametrize(
    ("reads", "places", "waited"), [(True, 2, (1750.0, 250.0)), (True, 1, (1750.0, 0.0)), (False, 2, (0.0, 0.0))]
)
def test_waits_are_told_to_a_policy_that_reads_them(reads: bool, places: int, waited: tuple[float, float]) -> None:
    clock, policy = Clock(), Watching(reads)
    d = Driver(FakeModel().as_ragged(), policy=policy, clock=clock, max_running=1 + places)
    d.add(request("runs", (1, 2), 9))
    d.step()
    d.add(replace(request("a", (1, 2), 9), slo=Slo(ttft_ms=700.0)))
    clock.now += 1.5
    d.add(replace(request("b", (1, 2), 9), slo=Slo(ttft_ms=700.0), prefix=(Token(0, 3),)))
    clock.now += 0.25
    d.step()
    told = policy.told[-1].waiting
    assert tuple(one.waited_ms for one in told) == waited
    assert [one.slo_ttft_ms for one in told] == [700.0, None], "the second has its first token"
